"""torchdata: stop within an epoch, and resume with the next batch."""

from itertools import islice

import torch
import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader

from ddp_patch import patch_dataloader_to_ddp


def make_loader() -> StatefulDataLoader[int]:
    """Make it as for one process, and patch it."""
    return patch_dataloader_to_ddp(StatefulDataLoader(torch.arange(64), batch_size=4, shuffle=True))


dist.init_process_group("gloo")
stopped = make_loader()
done = [batch.tolist() for batch in islice(stopped, 2)]  # two batches, then the job ends
state = stopped.state_dict()

resumed = make_loader()
resumed.load_state_dict(state)
done += [batch.tolist() for batch in resumed]
assert len({number for batch in done for number in batch}) == 64 // dist.get_world_size()
dist.destroy_process_group()
