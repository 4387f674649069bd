"""The orders of a command, carried out by the engine that its options name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckpt_cli.engines.call import PartCall
from ckpt_cli.formats.ages import refuse_unversioned
from ckpt_cli.output.options import WritingOptions
from ckpt_cli.output.publish import Order, Publication, publish
from ckpt_cli.progress import Progress


def publish_orders(
    orders: Sequence[Order], options: WritingOptions, progress: Progress | None, call: Callable[[], PartCall]
) -> list[Publication]:
    """Write and publish the orders of a command (or a part of them) as its options say; ``call`` is how other processes write parts.

    Raises what `publish` raises, EngineFailed, and Unsupported for parts of sources whose changes cannot be noticed.
    """
    if options.engine == "ray" or options.chosen_part is not None:
        for order in orders:
            refuse_unversioned([*order.plan.sources, *order.watched])
    if options.engine == "ray" and not options.dry_run:
        from ckpt_cli.engines.ray_driver import publish_by_ray

        return publish_by_ray(orders, call(), options, progress)
    return publish(
        orders,
        dry_run=options.dry_run,
        jobs=options.jobs,
        checksum=options.checksum,
        progress=progress,
        part=options.chosen_part,
        write=options.write,
    )
