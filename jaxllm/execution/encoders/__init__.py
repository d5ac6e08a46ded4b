"""The programs that encode the media of prompts, and their inputs."""
