"""Import path of the dispatch decorators, which do not exist here."""

raise ImportError(
    "verl.single_controller does not exist here: a worker group has two verbs, broadcast and scatter "
    "(verl.runtime.group.WorkerGroup), and the training loop reaches models through verl.workers.actor.Actor"
)
