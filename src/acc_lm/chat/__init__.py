"""Conversations: records of instruction data, chat templates, and the ids and targets made of them.

records        records of every common format -> conversations
template       chat templates: load, try on one exchange, render
items          conversation -> ids and targets
conversations  all conversations of a corpus -> items on disk
"""
