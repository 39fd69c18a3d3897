//! The readable copy of the journal: `journal.jsonl` for the part that grows, `journal.jsonl.1`
//! and so on for earlier parts, which end with an end line.
//!
//! It is written after the log and not synced, so it may be behind the log. It is never ahead of
//! it: a line that only the copy has was lost from the log.

use crate::AgentError;
use crate::daemon::store::log::{LONGEST, free_name};
use crate::daemon::store::submission::absent_is_fine;
use crate::os::disk::{Appending, Disk, replace};
use roommate_core::journal::{Observer, Writer};
use roommate_core::time::Time;
use std::io;
use std::path::{Path, PathBuf};

/// How an end line begins.
const END: &[u8] = b"{\"end\":";

/// The copy as it was found.
pub(super) struct Found {
    bytes: Vec<u8>,
}

/// What has to be done with the copy so that it equals the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// Nothing.
    Keep,
    /// Lines from this byte on are missing.
    Extend(usize),
    /// It ends with a line that it should not have.
    Cut(usize),
    /// It is the part before this one.
    Rotate,
    /// There is none.
    Write,
    /// It differs.
    SetAside,
}

impl Found {
    pub(super) fn read(disk: &dyn Disk, path: &Path) -> Result<Self, AgentError> {
        let bytes = absent_is_fine(disk.read(path, LONGEST));
        Ok(Self { bytes: bytes.map_err(AgentError::file("read", path))? })
    }

    /// Whether there is nothing in it.
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Whether it is a whole part: only those have an end line.
    fn has_ended(&self) -> bool {
        let last = self.bytes.trim_ascii_end().rsplit(|b| *b == b'\n').next();
        last.is_some_and(|line| line.starts_with(END))
    }

    /// Its whole lines, without an end line.
    pub(super) fn lines(&self) -> Vec<&[u8]> {
        let mut lines: Vec<&[u8]> = self
            .bytes
            .split_inclusive(|b| *b == b'\n')
            .filter_map(|line| line.strip_suffix(b"\n"))
            .collect();
        lines.pop_if(|last| last.starts_with(END));
        lines
    }

    /// The lines that follow those of the log, which have lost them. A line that is not JSON ends
    /// them.
    pub(super) fn beyond<'a>(&self, lines: &[&'a [u8]], from: usize) -> Vec<&'a [u8]> {
        if self.has_ended() {
            return Vec::new();
        }
        let is_line = |line: &&&[u8]| {
            serde_json::from_slice::<serde::de::IgnoredAny>(line).is_ok()
                && line.starts_with(b"{\"")
        };
        lines.iter().skip(from).take_while(is_line).copied().collect()
    }

    /// What has to be done so that the copy equals this journal.
    pub(super) fn fate(&self, journal: &[u8]) -> Fate {
        let beyond = self.bytes.strip_prefix(journal);
        match beyond {
            _ if self.bytes.is_empty() => Fate::Write,
            Some([]) => Fate::Keep,
            // A daemon died before it began the next part.
            Some(rest) if rest.starts_with(END) || !rest.contains(&b'\n') => {
                Fate::Cut(journal.len())
            }
            None if journal.starts_with(&self.bytes) => Fate::Extend(self.bytes.len()),
            _ if self.has_ended() => Fate::Rotate,
            _ => Fate::SetAside,
        }
    }
}

/// The copy that is being written.
pub(super) struct Copy {
    path: PathBuf,
    /// `None` after a failed write: the copy is a convenience, the journal in the log is whole.
    file: Option<Box<dyn Appending>>,
}

impl Copy {
    /// Makes the copy equal the journal.
    pub(super) fn open(
        disk: &dyn Disk,
        path: &Path,
        fate: Fate,
        journal: &[u8],
        (part, keep): (u64, usize),
    ) -> Result<Self, AgentError> {
        let mut copy = Self { path: path.to_owned(), file: None };
        let problem = |e| AgentError::file("write", path)(e);
        match fate {
            Fate::Keep | Fate::Extend(_) | Fate::Cut(_) => {}
            Fate::Write => copy.create(disk, journal)?,
            Fate::Rotate => {
                let before = number_path(path, part.saturating_sub(1));
                let taken = disk.identify(&before).is_ok() || part < 2;
                let to = if taken { free_name(disk, path) } else { before };
                disk.rename(path, &to).map_err(problem)?;
                copy.forget_old(disk, keep)?;
                copy.create(disk, journal)?;
            }
            Fate::SetAside => {
                disk.rename(path, &free_name(disk, path)).map_err(problem)?;
                copy.create(disk, journal)?;
            }
        }
        let mut file = disk.append(path).map_err(problem)?;
        match fate {
            Fate::Extend(from) => file.write(&journal[from..]).map_err(problem)?,
            Fate::Cut(length) => file.cut(length as u64).map_err(problem)?,
            _ => {}
        }
        copy.file = Some(file);
        Ok(copy)
    }

    fn create(&self, disk: &dyn Disk, journal: &[u8]) -> Result<(), AgentError> {
        replace(disk, &self.path, journal).map_err(AgentError::file("write", &self.path))
    }

    /// Adds lines that are in the log.
    pub(super) fn add(&mut self, lines: &[u8]) {
        if self.file.as_mut().is_some_and(|file| file.write(lines).is_err()) {
            self.file = None;
        }
    }

    /// Ends this part; it survives a loss of power when this returns. `whole` is the part without
    /// its end line, read only if the copy is not whole.
    pub(super) fn end(
        &mut self,
        disk: &dyn Disk,
        at: Time,
        whole: impl FnOnce() -> Result<Vec<u8>, AgentError>,
    ) -> Result<(), AgentError> {
        let mut end = Writer::new(Vec::new());
        end.end(at);
        let end = end.finish().expect("memory can always be written to");
        let problem = |e| AgentError::file("write", &self.path)(e);
        match self.file.take() {
            Some(mut file) => file.write(&end).and_then(|()| file.sync()).map_err(problem),
            None => self.create(disk, &[whole()?, end].concat()),
        }
    }

    /// Sets a damaged copy aside, so that [`end`](Self::end) writes a new one.
    pub(super) fn set_aside(disk: &dyn Disk, path: &Path) -> Result<Self, AgentError> {
        let kept = absent_is_fine(disk.link(path, &free_name(disk, path)));
        kept.map_err(AgentError::file("keep", path))?;
        Ok(Self { path: path.to_owned(), file: None })
    }

    fn forget_old(&self, disk: &dyn Disk, keep: usize) -> Result<(), AgentError> {
        let numbers = numbers(disk, &self.path).map_err(AgentError::file("list", &self.path))?;
        // At least one stays, because readers continue from its number.
        for number in &numbers[..numbers.len().saturating_sub(keep.max(1))] {
            let old = number_path(&self.path, *number);
            disk.remove(&old).map_err(AgentError::file("remove", &old))?;
        }
        Ok(())
    }
}

fn number_path(path: &Path, number: u64) -> PathBuf {
    let mut name = path.to_owned().into_os_string();
    name.push(format!(".{number}"));
    name.into()
}

/// Numbers of the earlier parts, oldest first.
pub(super) fn numbers(disk: &dyn Disk, path: &Path) -> io::Result<Vec<u64>> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let found = absent_is_fine(disk.list(path.parent().unwrap_or(Path::new("."))))?;
    let number = |name_found: &str| name_found.strip_prefix(&name)?.strip_prefix('.')?.parse().ok();
    let mut numbers: Vec<u64> = found.iter().filter_map(|e| number(&e.name)).collect();
    numbers.sort_unstable();
    Ok(numbers)
}
