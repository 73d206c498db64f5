"""Training of the feature maps: teacher traces and the trainer."""
