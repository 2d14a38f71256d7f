"""What is trained? Shapes and choices (`config`), names and files that give them (`catalogue`)."""
