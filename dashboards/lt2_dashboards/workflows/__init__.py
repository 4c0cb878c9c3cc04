"""What the workflow engine leaves in storage, read for pages: steps, and the workflows they are of."""
