"""Read computed embeddings, which come in the place of images and videos."""
