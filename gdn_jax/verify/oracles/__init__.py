"""What the checks compare with: recorded and live runs of transformers."""
