"""Command line for operators: shows and steers a run through the AdminService."""
