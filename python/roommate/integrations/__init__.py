"""Callbacks for training frameworks, one each: ``roommate.integrations.lightning`` and
``roommate.integrations.transformers``; ``roommate.integrations.ddp`` for loops of one's own in
several processes. Nothing here is imported before it is used.
"""
