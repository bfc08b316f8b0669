"""`python -m spectrain`, `torchrun -m spectrain` and `accelerate launch -m spectrain`."""

from .cli import main

if __name__ == "__main__":
    main()
