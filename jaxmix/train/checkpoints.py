"""Checkpoints: parameters, optimizer and data position of a step, through orbax."""

from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from jaxmix.data.pipeline import state_from_json, state_to_json
from jaxmix.train.step import TrainState


class Checkpoints:
    """The checkpoints of one run, by step. A context manager.

    Args:
        directory: where they are; made if it does not exist.
        keep: how many are kept, the latest ones.
    """

    def __init__(self, directory: Path, *, keep: int = 1) -> None:
        # Saving in the background would race with the next update, which reuses the memory of the arrays.
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=False)
        self._directory = directory.resolve()
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=options,
            item_names=("params", "optimizer", "data"),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._manager.close()

    @property
    def latest(self) -> int | None:
        """The step of the latest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, state: TrainState, data_state: Any) -> None:
        """Saves a step; one that is there already is left as it is.

        Args:
            state: after the step's update.
            data_state: `get_state()` of the data iterator after the step's batch.
        """
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(state.params),
                optimizer=ocp.args.StandardSave({"step": state.step, "state": state.opt_state}),
                data=ocp.args.JsonSave(state_to_json(data_state)),
            ),
        )

    def save_params(self, params: Any) -> None:
        """Saves parameters that come from elsewhere as step 0, from which training can start.

        Raises:
            ValueError: if there are checkpoints already.
        """
        if self.latest is not None:
            raise ValueError(f"directory: expected no checkpoint yet, found that of step {self.latest}")
        self._manager.save(0, args=ocp.args.Composite(params=ocp.args.StandardSave(params)))

    def restore(self, like: TrainState) -> tuple[TrainState, Any]:
        """The latest step.

        Args:
            like: a state of the same shapes and dtypes, arrays or ShapeDtypeStructs.

        Returns:
            The state, and what `save` got as `data_state`.

        Raises:
            ValueError: if there is no checkpoint.
        """
        restored = self._manager.restore(
            self._require_latest(),
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(_abstract(like.params)),
                optimizer=ocp.args.StandardRestore(_abstract({"step": like.step, "state": like.opt_state})),
                data=ocp.args.JsonRestore(),
            ),
        )
        optimizer = restored["optimizer"]
        return TrainState(optimizer["step"], restored["params"], optimizer["state"]), state_from_json(restored["data"])

    def restore_params(self, like: Any, step: int | None = None) -> Any:
        """The parameters of one step alone.

        Args:
            like: parameters of the same shapes and dtypes, arrays or ShapeDtypeStructs.
            step: which; the latest by default.

        Raises:
            ValueError: if there is no such checkpoint.
        """
        latest, steps = self._require_latest(), self._manager.all_steps()
        if step is not None and step not in steps:
            raise ValueError(f"step: expected one of the checkpoints {sorted(steps)}, got {step}")
        args = ocp.args.Composite(params=ocp.args.StandardRestore(_abstract(like)))
        return self._manager.restore(latest if step is None else step, args=args)["params"]

    def _require_latest(self) -> int:
        if self.latest is None:
            raise ValueError(f"directory: expected a run with a checkpoint, found none in {self._directory}")
        return self.latest


def _abstract(tree: Any) -> Any:
    """Shapes and dtypes, on the devices of the arrays, or on the first device where there are none."""
    first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) or first), tree
    )
