"""Vision towers: they turn the patches of images and of frames into rows of a text model's width."""
