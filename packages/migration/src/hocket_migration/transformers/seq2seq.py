"""transformers' Seq2SeqTrainer with the loop of hocket."""

from __future__ import annotations

import transformers

from hocket_migration.transformers.trainer import OnHocket


class Seq2SeqTrainer(OnHocket, transformers.Seq2SeqTrainer):
    """transformers' Seq2SeqTrainer, whose steps and evaluations hocket runs; see `hocket_migration.transformers.Trainer`.

    With ``predict_with_generate=True`` evaluations generate, by the ``prediction_step`` of transformers.
    """
