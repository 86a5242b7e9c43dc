"""The pictures of the documents."""

from docs.generate.figures import bandwidth, drift, floors, tokens
from docs.generate.figures.svg import Picture

PICTURES = (
    Picture("architecture", floors.data, floors.draw),
    Picture("bandwidth", bandwidth.data, bandwidth.draw),
    Picture("drift", drift.data, drift.draw),
    Picture("tokens", tokens.data, tokens.draw),
)
