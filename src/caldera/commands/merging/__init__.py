"""`caldera merge`: a Hugging Face folder out of a checkpoint."""
