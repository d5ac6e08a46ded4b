"""Turn speech into text with Whisper: from a file of any length to segments, words and subtitles."""
