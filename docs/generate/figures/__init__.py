"""Pictures of the recorded results, as SVG that is readable on a light and on a dark page."""
