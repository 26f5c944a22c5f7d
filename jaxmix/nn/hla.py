"""Higher-order linear attention as a layer."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from jaxmix.arrays import Array, check_choice, check_flag, fail
from jaxmix.mixers.hla import AHLAState, HLA2State, HLA3State, ahla, hla2, hla3
from jaxmix.nn.base import TokenMixer
from jaxmix.nn.recurrent import RecurrentConfig, RecurrentMixer


@dataclasses.dataclass(frozen=True, kw_only=True)
class HLAConfig(RecurrentConfig):
    """Configuration of `HLA`: the order, and the options of every recurrent layer.

    Attributes:
        order: 2 for the symmetric second order, "asymmetric" for the asymmetric second order, 3 for the third.
        ridge: order 2 only, see `jaxmix.hla2`.
        masked: order 2 only, see `jaxmix.hla2`.
        decay_form: order 2 only, see `jaxmix.hla2`.
        mask: order 3 only, see `jaxmix.hla3`; "printed" needs decay=None.
    """

    name: ClassVar[str] = "hla"
    order: Literal[2, "asymmetric", 3] = 2
    ridge: float = 0.0
    masked: bool = True
    decay_form: Literal["masked", "printed"] = "masked"
    mask: Literal["exact", "printed"] = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("order", self.order, (2, "asymmetric", 3))
        if isinstance(self.ridge, bool) or not isinstance(self.ridge, int | float) or not self.ridge >= 0:
            fail("ridge", "a number of at least 0", repr(self.ridge))
        check_flag("masked", self.masked)
        check_choice("decay_form", self.decay_form, ("masked", "printed"))
        check_choice("mask", self.mask, ("exact", "printed"))
        for option, order, default in (
            ("ridge", 2, 0),
            ("masked", 2, True),
            ("decay_form", 2, "masked"),
            ("mask", 3, "exact"),
        ):
            if self.order != order and getattr(self, option) != default:
                fail(
                    option, f"{default!r} unless order={order}", f"{getattr(self, option)!r} with order={self.order!r}"
                )
        if self.decay_form == "printed" and not self.masked:
            fail("decay_form", "'masked' with masked=False", repr(self.decay_form))
        if self.mask == "printed" and self.decay is not None:
            fail("mask", "'exact' with a decay, or decay=None", repr(self.mask))

    @property
    def layer(self) -> type[TokenMixer]:
        """`HLA`."""
        return HLA

    def mixer_products(self, d_model: int, length: int) -> int:
        """The chain of linear attentions that the order is made of, without the options of order 2."""
        keys, values = self.head_sizes(d_model)
        scores = self.chunk_size * keys
        if self.order == "asymmetric":
            return self.heads * (scores + 2 * self.linear_products(keys, values))
        chain = 2 * scores + self.linear_products(keys, keys) + self.linear_products(keys, values)
        if self.order == 2:
            return self.heads * (chain + keys * values)
        return self.heads * (chain + self.linear_products(keys, values) + keys * keys)

    @property
    def mixer_name(self) -> str:
        """That of the function of this order; the printed forms have names of their own."""
        name = {2: "hla2", "asymmetric": "ahla", 3: "hla3"}[self.order]
        return f"{name}_printed" if "printed" in (self.decay_form, self.mask) else name

    @property
    def mixer(self) -> Callable[..., tuple[Array, Any]]:
        """The function of this order."""
        if self.order == 2:
            return functools.partial(hla2, ridge=self.ridge, masked=self.masked, decay_form=self.decay_form)
        return ahla if self.order == "asymmetric" else functools.partial(hla3, mask=self.mask)

    @property
    def state(self) -> Any:
        """The class of the state of this order."""
        return {2: HLA2State, "asymmetric": AHLAState, 3: HLA3State}[self.order]


class HLA(RecurrentMixer):
    """Higher-order linear attention, `HLA(d_model, heads=H, order=2 | "asymmetric" | 3, ..., rngs=rngs)`.

    See `MixerLayer` for the arguments and `HLAConfig` for the options.

    Source: Zhang et al., "Higher-order Linear Attention", arXiv 2510.27258.
    """

    config_class = HLAConfig
