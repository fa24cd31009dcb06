"""`python -m verl.trainer.certify key=value …`."""

from verl.commands.certify.command import main
from verl.utils.process_end import end_process

if __name__ == "__main__":
    end_process(main)
