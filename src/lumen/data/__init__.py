"""From files to batches: readers, row formats, chat rendering and loss masks, packing, loader, cache, inspection."""
