"""Callbacks for training frameworks, one each: ``roommate.integrations.lightning`` and
``roommate.integrations.transformers``. Nothing here is imported before it is used.
"""
