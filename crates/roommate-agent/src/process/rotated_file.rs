//! A file that is rotated: `log` is the part that grows, `log.1`, `log.2` and so on are earlier
//! parts, oldest first. Numbers only rise, so a reader that knows a part and a position in it can
//! continue there after any number of rotations.

use crate::os::disk;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Default length at which a file is rotated.
pub const USUAL_BYTES: u64 = 16 << 20;
/// Default number of earlier parts that are kept.
pub const USUAL_PARTS: usize = 4;

/// Numbers from here on are none that this program gave.
const LARGEST_NUMBER: u64 = 1 << 53;
/// How many parts a reader looks at before it returns; more than are ever kept.
const LOOKS: usize = 64;

/// A reader's position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// The part; 0 = the oldest that exists.
    pub part: u64,
    /// Bytes of it that were read.
    pub at: u64,
}

/// All parts of a rotated file.
#[derive(Clone, Debug)]
pub struct Parts {
    path: PathBuf,
}

impl Parts {
    /// The file that grows at this path, and its earlier parts.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Numbers of the earlier parts, oldest first.
    pub fn numbers(&self) -> Vec<u64> {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let folder = self.path.parent().unwrap_or(Path::new("."));
        let number = |entry: fs::DirEntry| -> Option<u64> {
            let file = entry.file_name();
            file.to_str()?.strip_prefix(&name)?.strip_prefix('.')?.parse().ok()
        };
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        // The folder may belong to a tenant, who may put any name there.
        let mut found: Vec<u64> =
            entries.filter_map(number).filter(|n| *n < LARGEST_NUMBER).collect();
        found.sort_unstable();
        found
    }

    /// Path of an earlier part.
    pub fn path_of(&self, number: u64) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        path.push(format!(".{number}"));
        path.into()
    }

    /// All existing parts, oldest first; the last is the one that grows.
    pub fn paths(&self) -> Vec<PathBuf> {
        let cut = self.numbers().into_iter().map(|n| self.path_of(n));
        cut.chain(std::iter::once(self.path.clone()).filter(|p| p.exists())).collect()
    }

    /// Makes the growing part an earlier part. Only the last `keep` earlier parts stay, at least
    /// one, because the next number follows from it.
    pub fn cut(&self, keep: usize) -> io::Result<()> {
        let next = self.numbers().last().map_or(1, |last| last + 1);
        self.cut_as(next, keep)
    }

    /// The same with a number chosen by the caller.
    pub(crate) fn cut_as(&self, number: u64, keep: usize) -> io::Result<()> {
        fs::rename(&self.path, self.path_of(number))?;
        let numbers = self.numbers();
        let gone = numbers.len().saturating_sub(keep.max(1));
        for number in numbers.into_iter().take(gone) {
            fs::remove_file(self.path_of(number))?;
        }
        Ok(())
    }

    /// Removes all parts.
    pub fn remove(&self) {
        for path in self.paths() {
            let _ = fs::remove_file(path);
        }
    }

    /// Bytes of all parts together.
    pub fn bytes(&self) -> u64 {
        self.paths().iter().filter_map(|p| fs::symlink_metadata(p).ok()).map(|m| m.len()).sum()
    }

    /// The bytes from a position on, at most `limit` and never beyond the end of a part, and the
    /// position after them. No bytes means that nothing more has been written yet. Only regular
    /// files are read: a link, a pipe or a folder in the place of a part counts as an empty one.
    pub fn read(&self, from: Place, limit: u64) -> io::Result<(Vec<u8>, Place)> {
        let mut place = from;
        for _ in 0..LOOKS {
            let numbers = self.numbers();
            let growing = numbers.last().map_or(1, |last| last + 1);
            // If the part was removed, the next existing one follows.
            let part = numbers.iter().copied().find(|n| *n >= place.part).unwrap_or(growing);
            if part != place.part {
                place = Place { part, at: 0 };
            }
            let path = if part == growing { self.path.clone() } else { self.path_of(part) };
            let mut file = match disk::open_regular(&path) {
                Ok(file) => file,
                Err(e) if !is_absent(&e) => return Err(e),
                Err(_) if part == growing => return Ok((Vec::new(), place)),
                Err(_) => {
                    place = Place { part: part + 1, at: 0 };
                    continue;
                }
            };
            if part == growing && self.numbers() != numbers {
                continue; // It was rotated after it was opened.
            }
            file.seek(SeekFrom::Start(place.at))?;
            let mut bytes = Vec::new();
            file.take(limit).read_to_end(&mut bytes)?;
            place.at += bytes.len() as u64;
            if bytes.is_empty() && part < growing {
                place = Place { part: part + 1, at: 0 };
                continue;
            }
            return Ok((bytes, place));
        }
        Ok((Vec::new(), place))
    }
}

/// Whether an error means that there is no file, or none that may be read.
fn is_absent(error: &io::Error) -> bool {
    let not_regular = [io::ErrorKind::NotFound, io::ErrorKind::InvalidInput];
    let link = rustix::io::Errno::LOOP.raw_os_error();
    not_regular.contains(&error.kind()) || error.raw_os_error() == Some(link)
}

/// Writes a file in parts of at most about `limit` bytes, each of whole lines.
pub(crate) struct Cutter {
    parts: Parts,
    file: File,
    length: u64,
    limit: u64,
    keep: usize,
}

impl Cutter {
    pub(crate) fn open(path: &Path, limit: u64, keep: usize) -> io::Result<Self> {
        let file = File::options().create(true).append(true).open(path)?;
        let length = file.metadata()?.len();
        Ok(Self { parts: Parts::new(path), file, length, limit, keep })
    }

    pub(crate) fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while self.length + bytes.len() as u64 > self.limit {
            // A line longer than a part is split, because memory and disk are limited.
            let room = self.limit.saturating_sub(self.length).min(bytes.len() as u64) as usize;
            let line_end = bytes[..room].iter().rposition(|b| *b == b'\n').map(|at| at + 1);
            let (fits, rest) =
                bytes.split_at(line_end.unwrap_or(if self.length == 0 { room } else { 0 }));
            self.put(fits)?;
            bytes = rest;
            self.parts.cut(self.keep)?;
            let path = &self.parts.path;
            self.file = File::options().create(true).append(true).open(path)?;
            self.length = 0;
        }
        self.put(bytes)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.length += bytes.len() as u64;
        self.file.write_all(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_continues_across_rotations() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let parts = Parts::new(&path);
        let mut out = Cutter::open(&path, 20, 2).unwrap();
        let (mut place, mut read, mut written) = (Place::default(), Vec::new(), Vec::new());
        for n in 0..100 {
            let line = format!("line {n}\n");
            out.write(line.as_bytes()).unwrap();
            written.extend_from_slice(line.as_bytes());
            loop {
                let (bytes, next) = parts.read(place, 3).unwrap();
                place = next;
                if bytes.is_empty() {
                    break;
                }
                read.extend(bytes);
            }
        }
        assert_eq!(read, written);
        assert_eq!(parts.paths().len(), 3);
        for path in parts.paths() {
            let text = fs::read_to_string(path).unwrap();
            assert!(
                text.starts_with("line ") && text.ends_with('\n') && text.len() <= 20,
                "{text:?}"
            );
        }
        // A new reader begins with the oldest part that is kept.
        let (bytes, place) = parts.read(Place::default(), 1000).unwrap();
        assert!(String::from_utf8(bytes).unwrap().starts_with("line 94"), "{place:?}");
        parts.remove();
        assert!(parts.paths().is_empty() && parts.bytes() == 0);
    }

    #[test]
    fn links_and_pipes_of_a_tenant_are_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let (path, secret) = (folder.path().join("log"), folder.path().join("secret"));
        let at = |n: u64| Parts::new(&path).path_of(n);
        fs::write(&secret, "secret").unwrap();
        std::os::unix::fs::symlink("/nonexistent", at(1)).unwrap();
        std::os::unix::fs::symlink(&secret, at(2)).unwrap();
        let pipe = rustix::fs::FileType::Fifo;
        let mode = rustix::fs::Mode::RWXU;
        rustix::fs::mknodat(rustix::fs::CWD, at(3), pipe, mode, 0).unwrap();
        fs::create_dir(at(4)).unwrap();
        fs::write(at(5), "five").unwrap();
        fs::write(at(u64::MAX), "far").unwrap();
        fs::write(&path, "six").unwrap();
        let parts = Parts::new(&path);
        let (bytes, place) = parts.read(Place::default(), 100).unwrap();
        assert_eq!((&bytes[..], place), (&b"five"[..], Place { part: 5, at: 4 }));
        let (bytes, place) = parts.read(place, 100).unwrap();
        assert_eq!((&bytes[..], place), (&b"six"[..], Place { part: 6, at: 3 }));
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&secret, &path).unwrap();
        assert_eq!(parts.read(place, 100).unwrap(), (Vec::new(), Place { part: 6, at: 3 }));
        // However many there are, a reader returns.
        for n in 10..200 {
            std::os::unix::fs::symlink("/nonexistent", at(n)).unwrap();
        }
        let (bytes, place) = parts.read(Place { part: 10, at: 0 }, 100).unwrap();
        assert!(bytes.is_empty() && place.part > 10);
    }

    #[test]
    fn a_line_longer_than_a_part_is_split_without_loss() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut out = Cutter::open(&path, 10, 100).unwrap();
        out.write(&[b'x'; 35]).unwrap();
        out.write(b"y\n").unwrap();
        let lengths: Vec<u64> =
            Parts::new(&path).paths().iter().map(|p| fs::metadata(p).unwrap().len()).collect();
        assert_eq!(lengths, [10, 10, 10, 7]);
    }
}
