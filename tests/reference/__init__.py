"""What engines and actors must reproduce token for token, and its recorded answers for the demo models."""
