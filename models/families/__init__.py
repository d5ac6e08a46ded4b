"""The families of models, one file each; `FAMILIES` in a file maps architectures to families."""
