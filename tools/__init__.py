"""Scripts that write the documents, schemas and fits of the repository."""
