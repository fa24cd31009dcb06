"""`python3 -m verl.trainer.certify key=value ...`: the earlier spelling of `verl certify`."""

from verl.commands.certify import main
from verl.utils.process_end import end_process

if __name__ == "__main__":
    end_process(main)
