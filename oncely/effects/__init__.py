"""Calls to the outside that no transaction can undo: made once, or known to be in doubt."""

from oncely.effects.record import NOT_HAPPENED, EffectRecord, Status

__all__ = ["NOT_HAPPENED", "EffectRecord", "Status"]
