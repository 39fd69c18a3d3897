//! A plain or gzip file as lines of bounded length; one line is in memory at a time.
//!
//! This module only finds lines; the readers of the formats interpret them.

use super::error::{Bad, Problem, TraceError};
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

/// Longest accepted line in bytes. The longest real one (a Gavel command line) has 300 bytes.
pub(super) const MAX_LINE: usize = 1 << 20;

const BYTE_ORDER_MARK: [u8; 3] = [0xef, 0xbb, 0xbf];

/// An open trace file.
pub(super) struct Source {
    what: &'static str,
    path: Box<Path>,
    reader: BufReader<Box<dyn Read>>,
    line: u64,
    text: Vec<u8>,
    held: bool,
    first: u8,
}

impl Source {
    /// Opens a file and skips its byte order mark and leading white space; `what` names it in
    /// errors.
    pub(super) fn open(path: &Path, what: &'static str) -> Result<Self, TraceError> {
        let fail = |e: &io::Error| TraceError {
            what,
            path: path.into(),
            line: None,
            column: None,
            problem: e.into(),
        };
        let reader = crate::trace::gzip::open(path).map_err(|e| fail(&e))?;
        Self::over(reader, path, what)
    }

    fn over(
        reader: BufReader<Box<dyn Read>>,
        path: &Path,
        what: &'static str,
    ) -> Result<Self, TraceError> {
        let mut source = Self {
            what,
            path: path.into(),
            reader,
            line: 0,
            text: Vec::new(),
            held: false,
            first: 0,
        };
        let mut marks = BYTE_ORDER_MARK.iter();
        let mut mark = marks.next();
        loop {
            let Some(byte) = source.peek()? else {
                return Err(source.whole_file(Problem::Empty));
            };
            if Some(&byte) == mark {
                mark = marks.next();
            } else {
                mark = None;
                if !byte.is_ascii_whitespace() {
                    source.first = byte;
                    return Ok(source);
                }
                source.line += u64::from(byte == b'\n');
            }
            source.reader.consume(1);
        }
    }

    fn peek(&mut self) -> Result<Option<u8>, TraceError> {
        Ok(self.chunk()?.first().copied())
    }

    /// The next buffered bytes; empty at the end. For readers that do not work by line.
    pub(super) fn chunk(&mut self) -> Result<&[u8], TraceError> {
        // Filled twice because the borrow checker cannot yet return the first borrow conditionally;
        // the second call finds the buffer full and does nothing.
        while let Err(e) = self.reader.fill_buf() {
            if e.kind() != io::ErrorKind::Interrupted {
                let mut error = self.error_at(self.line + 1, Problem::from(&e).into());
                if matches!(error.problem, Problem::Io(_)) {
                    error.line = None;
                }
                return Err(error);
            }
        }
        Ok(self.reader.buffer())
    }

    /// Marks `bytes` of the chunk as read; they contained `newlines` line ends.
    pub(super) fn consume(&mut self, bytes: usize, newlines: u64) {
        self.reader.consume(bytes);
        self.line += newlines;
    }

    /// The first byte of the file that is not white space.
    pub(super) fn first_byte(&self) -> u8 {
        self.first
    }

    /// Number of the line read last, from 1 (for chunk readers: lines passed so far).
    pub(super) fn line(&self) -> u64 {
        self.line
    }

    /// Reads the next line that is not blank; false at the end of the file.
    pub(super) fn next_line(&mut self) -> Result<bool, TraceError> {
        if std::mem::take(&mut self.held) {
            return Ok(true);
        }
        while self.raw_line()? {
            if !self.text.iter().all(u8::is_ascii_whitespace) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn raw_line(&mut self) -> Result<bool, TraceError> {
        self.text.clear();
        let mut done = false;
        while !done {
            let chunk = self.chunk()?;
            if chunk.is_empty() {
                break;
            }
            let end = memchr::memchr(b'\n', chunk);
            done = end.is_some();
            let bytes = end.unwrap_or(chunk.len());
            let used = bytes + usize::from(done);
            // Copied by index because `chunk` borrows all of `self`.
            self.text.extend_from_slice(&self.reader.buffer()[..bytes]);
            self.reader.consume(used);
            if self.text.len() > MAX_LINE {
                let problem = Problem::LongLine { limit_kib: MAX_LINE >> 10 };
                return Err(self.error_at(self.line + 1, problem.into()));
            }
        }
        if !done && self.text.is_empty() {
            return Ok(false);
        }
        if self.text.last() == Some(&b'\r') {
            self.text.pop();
        }
        self.line += 1;
        Ok(true)
    }

    /// Makes the next call of `next_line` return this line again.
    pub(super) fn hold(&mut self) {
        self.held = true;
    }

    /// The line read last.
    pub(super) fn text(&self) -> Result<&str, Problem> {
        std::str::from_utf8(&self.text).map_err(|_| Problem::Utf8)
    }

    /// An error of the file as a whole.
    pub(super) fn whole_file(&self, problem: Problem) -> TraceError {
        TraceError { what: self.what, path: self.path.clone(), line: None, column: None, problem }
    }

    /// An error in the given line.
    pub(super) fn error_at(&self, line: u64, bad: Bad) -> TraceError {
        TraceError {
            what: self.what,
            path: self.path.clone(),
            line: Some(line),
            column: bad.column,
            problem: bad.problem,
        }
    }

    /// An error in the line read last.
    pub(super) fn error_here(&self, bad: impl Into<Bad>) -> TraceError {
        self.error_at(self.line, bad.into())
    }
}

/// Errors of [`crate::trace::gzip`] as text.
impl From<&io::Error> for Problem {
    fn from(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::Io("no such file".to_owned()),
            io::ErrorKind::PermissionDenied => Self::Io("permission denied".to_owned()),
            io::ErrorKind::IsADirectory => Self::Io("it is a directory".to_owned()),
            // Only the decoder returns these: a plain file just ends.
            io::ErrorKind::UnexpectedEof => Self::Truncated,
            io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => {
                Self::Gzip(error.to_string())
            }
            _ => Self::Io(error.to_string()),
        }
    }
}
