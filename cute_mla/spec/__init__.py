"""What is asked, how it is tiled and what the operands are. Standard library only; everything else imports it."""
