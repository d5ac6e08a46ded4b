"""Routes of pooling models: embeddings, classification, scores and reranking, in each dialect."""
