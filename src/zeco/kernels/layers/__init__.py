"""What layers do beside their operator."""
