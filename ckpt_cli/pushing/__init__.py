"""Outputs that are pushed to the Hugging Face Hub: where to, the model card, the upload, and what its errors mean."""
