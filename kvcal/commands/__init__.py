"""What the commands do once their options are parsed, a module a group; everything here may import torch."""
