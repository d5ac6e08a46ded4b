"""Read the files of torch.save without PyTorch: pytorch_model.bin, in one file or several with an index."""
