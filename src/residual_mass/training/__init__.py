"""Training of the feature maps."""
