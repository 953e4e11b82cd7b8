"""The written report: judged rows in, tables, figures and sentences out. Nothing here trains or samples."""
