"""Routers of mixture-of-experts models: what they choose, and their auxiliary loss."""

from areal_dta.executor.routers.aux_loss import RouterAuxLoss, find_routers
from areal_dta.executor.routers.load import RouterLoad, is_router

__all__ = ["RouterAuxLoss", "RouterLoad", "find_routers", "is_router"]
