//! The log: a file of sealed lines, to which transactions are added.
//!
//! A transaction is written with one write and one sync; its last line says that it ends there. At
//! the end of a log there may be a transaction that was being written when its daemon died; it is
//! removed as a whole. Any other line that does not verify is damage.

use crate::AgentError;
use crate::daemon::store::seal::{self, Kind, Line, Place};
use crate::os::disk::{self, Appending, Disk};
use std::io;
use std::path::{Path, PathBuf};

/// Most bytes of a log that is read.
pub(super) const LONGEST: u64 = 8 << 30;

/// A line to be written.
pub(super) type Pending = (Kind, Vec<u8>);

/// Damaged lines between two that verify.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Gap {
    /// The place after the last line before the damage.
    pub(super) from: Place,
    /// The place before the first line after it.
    pub(super) to: Place,
}

impl Gap {
    /// Lines of the journal that were lost.
    pub(super) fn journaled(&self) -> usize {
        (self.to.journaled - self.from.journaled) as usize
    }

    /// Records of the store that were lost.
    pub(super) fn records(&self) -> usize {
        (self.to.number - self.from.number) as usize - self.journaled()
    }
}

/// What is in a log, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Item<'a> {
    Line(Line<'a>),
    Gap(Gap),
}

/// What follows the last whole transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tail {
    /// Nothing.
    None,
    /// The beginning of a transaction that was not finished.
    Torn,
    /// Something that no daemon wrote there.
    Damaged,
}

/// A log that was read.
#[derive(Clone, Debug)]
pub(super) struct Reading<'a> {
    pub(super) items: Vec<Item<'a>>,
    /// The place after the last whole transaction.
    pub(super) end: Place,
    /// Bytes up to there.
    pub(super) length: usize,
    /// Bytes of the first transaction.
    pub(super) began_with: usize,
    pub(super) tail: Tail,
    /// Lines, whole or not, in what follows.
    pub(super) cut_lines: usize,
    /// Whether only the end of the last line is missing.
    pub(super) unterminated: bool,
}

/// Reads the bytes of a log.
pub(super) fn read(bytes: &[u8]) -> Reading<'_> {
    let mut items: Vec<Item<'_>> = Vec::new();
    let (mut place, mut at, mut intact) = (Place::default(), 0, true);
    // What is known up to the last line that ends a transaction.
    let (mut end, mut length, mut began_with, mut whole) = (place, 0, 0, 0);
    let (mut torn, mut bad_end) = (true, false);
    for piece in bytes.split_inclusive(|b| *b == b'\n') {
        at += piece.len();
        let mut line = seal::verify(piece);
        if let (None, [whole @ .., last]) = (line, piece)
            && *last != b'\n'
        {
            // Nothing is wrong but the end of the line.
            line = seal::verify(whole);
            bad_end = line.is_some();
        }
        let Some(line) = line.filter(|l| follows(l, place, intact)) else {
            // A write that was cut short leaves the beginning of a line.
            torn = intact && !piece.contains(&0) && !piece.ends_with(b"\n");
            intact = false;
            continue;
        };
        if line.place != place {
            items.push(Item::Gap(Gap { from: place, to: line.place }));
        }
        (intact, torn) = (true, true);
        items.push(Item::Line(line));
        place = line.place.after(line.kind, line.text);
        if line.commits {
            (end, length, whole) = (place, at, items.len());
            began_with = if began_with == 0 { at } else { began_with };
        }
    }
    let has_gap = items[whole..].iter().any(|item| matches!(item, Item::Gap(_)));
    items.truncate(whole);
    let tail = match length == bytes.len() {
        true if bad_end => Tail::Damaged,
        true => Tail::None,
        false if torn && !has_gap => Tail::Torn,
        false => Tail::Damaged,
    };
    let unterminated = tail == Tail::None && !bytes.is_empty() && !bytes.ends_with(b"\n");
    let cut_lines = bytes[length..].split_inclusive(|b| *b == b'\n').count();
    Reading { items, end, length, began_with, tail, cut_lines, unterminated }
}

/// Whether a line may stand here: next to the one before, or, after damage, further on.
fn follows(line: &Line<'_>, place: Place, intact: bool) -> bool {
    let Place { number, journaled, chain } = line.place;
    if intact {
        return line.place == place;
    }
    // The first line of a log determines the chain, so without it any chain will do.
    let chained = journaled > place.journaled || chain == place.chain || place.number == 0;
    let lost = number.checked_sub(place.number);
    let lost_journal = journaled.checked_sub(place.journaled);
    chained && lost.zip(lost_journal).is_some_and(|(all, journal)| all > 0 && journal <= all)
}

/// The bytes of a transaction that begins at a place, and the place after it.
pub(super) fn sealed(mut place: Place, lines: &[Pending]) -> (Vec<u8>, Place) {
    let length: usize = lines.iter().map(|(_, text)| text.len() + 64).sum();
    let mut bytes = Vec::with_capacity(length);
    for (i, (kind, text)) in lines.iter().enumerate() {
        place = place.seal(*kind, i + 1 == lines.len(), text, &mut bytes);
    }
    (bytes, place)
}

/// A log to which transactions are added.
pub(super) struct Log {
    path: PathBuf,
    file: Box<dyn Appending>,
    inode: u64,
    length: u64,
    began_with: u64,
    place: Place,
}

impl Log {
    /// Writes a log that consists of one transaction, in place of the one that is there.
    pub(super) fn create(
        disk: &dyn Disk,
        path: &Path,
        lines: &[Pending],
    ) -> Result<Self, AgentError> {
        let (bytes, place) = sealed(Place::default(), lines);
        disk::replace(disk, path, &bytes).map_err(AgentError::file("write", path))?;
        Self::open(disk, path, place, (bytes.len(), bytes.len()))
    }

    /// Continues the log that was read: at this place, with this length and of which so many bytes
    /// are its first transaction.
    pub(super) fn open(
        disk: &dyn Disk,
        path: &Path,
        place: Place,
        (length, began_with): (usize, usize),
    ) -> Result<Self, AgentError> {
        let mut file = disk.append(path).map_err(AgentError::file("open", path))?;
        // A daemon that was killed may not have synced its last lines. They count from now on, so
        // they have to last.
        file.sync().map_err(AgentError::file("sync", path))?;
        let (inode, _) = disk.identify(path).map_err(AgentError::file("open", path))?;
        let (length, began_with) = (length as u64, began_with as u64);
        Ok(Self { path: path.to_owned(), file, inode, length, began_with, place })
    }

    /// Removes what follows the last whole transaction, and ends its last line.
    pub(super) fn trim(&mut self, unterminated: bool) -> Result<(), AgentError> {
        let problem = |e| AgentError::file("repair", &self.path)(e);
        if unterminated {
            self.file.write(b"\n").map_err(problem)?;
            self.length += 1;
        } else {
            self.file.cut(self.length).map_err(problem)?;
        }
        self.file.sync().map_err(problem)
    }

    /// Adds a transaction, which survives a loss of power when this returns.
    pub(super) fn add(&mut self, disk: &dyn Disk, lines: &[Pending]) -> Result<(), AgentError> {
        self.check(disk)?;
        let (bytes, place) = sealed(self.place, lines);
        if let Err(e) = self.file.write(&bytes) {
            // What was written of it would be removed by the next daemon as well.
            let _ = self.file.cut(self.length);
            return Err(AgentError::file("write", &self.path)(e));
        }
        self.file.sync().map_err(AgentError::file("write", &self.path))?;
        self.length += bytes.len() as u64;
        self.place = place;
        Ok(())
    }

    /// Whether the file is the one that was opened, with what was written to it and nothing else.
    pub(super) fn check(&self, disk: &dyn Disk) -> Result<(), AgentError> {
        let what = match disk.identify(&self.path) {
            Ok((inode, length)) if (inode, length) == (self.inode, self.length) => return Ok(()),
            Ok((inode, _)) if inode != self.inode => "it was replaced",
            Ok(_) => "another process wrote to it",
            Err(e) if e.kind() == io::ErrorKind::NotFound => "it was removed",
            Err(e) => return Err(AgentError::file("read", &self.path)(e)),
        };
        Err(AgentError::Taken { path: self.path.clone(), what: what.into() })
    }

    /// Bytes of its first transaction.
    #[cfg(test)]
    pub(super) fn began_with(&self) -> u64 {
        self.began_with
    }

    /// Bytes that were added since the log was begun.
    pub(super) fn grown(&self) -> u64 {
        self.length.saturating_sub(self.began_with)
    }
}

/// A name under which a damaged file is kept: `PATH.damaged-N`.
pub(super) fn free_name(disk: &dyn Disk, path: &Path) -> PathBuf {
    let named = |n: u32| {
        let mut name = path.to_owned().into_os_string();
        name.push(format!(".damaged-{n}"));
        PathBuf::from(name)
    };
    let is_free =
        |path: &PathBuf| disk.identify(path).is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
    (1..u32::MAX).map(named).find(is_free).unwrap_or_else(|| named(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn journal(text: &str) -> Pending {
        (Kind::Journal, text.as_bytes().to_vec())
    }

    /// A log of three transactions, and where each ends.
    fn sample() -> (Vec<u8>, Vec<usize>) {
        let record = (Kind::Record, b"record".to_vec());
        let (mut bytes, mut place) = (Vec::new(), Place::default());
        let mut ends = Vec::new();
        for lines in [
            vec![record.clone(), journal("head")],
            vec![journal("one"), record, journal("two")],
            vec![journal("three")],
        ] {
            let (added, after) = sealed(place, &lines);
            bytes.extend(added);
            place = after;
            ends.push(bytes.len());
        }
        (bytes, ends)
    }

    fn texts(reading: &Reading<'_>) -> Vec<String> {
        let text = |item: &Item<'_>| match item {
            Item::Line(line) => String::from_utf8(line.text.to_vec()).unwrap(),
            Item::Gap(gap) => format!("gap {} {}", gap.journaled(), gap.records()),
        };
        reading.items.iter().map(text).collect()
    }

    #[test]
    fn a_transaction_is_there_as_a_whole_or_not_at_all() {
        let (bytes, ends) = sample();
        for length in 0..=bytes.len() {
            let reading = read(&bytes[..length]);
            // The end of the last line adds nothing.
            let whole = ends.iter().filter(|end| **end <= length + 1).count();
            let lines: usize = [0, 2, 5, 6][whole];
            assert_eq!(reading.items.len(), lines, "{length}");
            let at_an_end = length == 0 || ends.iter().any(|e| *e == length || *e == length + 1);
            let tail = if at_an_end { Tail::None } else { Tail::Torn };
            assert_eq!(reading.tail, tail, "{length}");
            assert_eq!(reading.unterminated, ends.contains(&(length + 1)), "{length}");
        }
    }

    #[test]
    fn every_flipped_bit_is_seen_as_damage() {
        let (bytes, _) = sample();
        let whole = texts(&read(&bytes));
        for bit in 0..8 * bytes.len() {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let reading = read(&bad);
            let seen = reading.tail == Tail::Damaged
                || reading.items.iter().any(|item| matches!(item, Item::Gap(_)));
            // A digit in capitals and a missing end of the last line change nothing.
            assert!(seen || texts(&reading) == whole, "bit {bit}: {:?}", texts(&reading));
        }
    }

    #[test]
    fn lines_after_damage_still_count() {
        let (bytes, _) = sample();
        let at = bytes.windows(3).position(|w| w == b"one").unwrap();
        let mut bad = bytes.clone();
        bad[at] ^= 1;
        let found = read(&bad);
        assert_eq!(texts(&found), ["record", "head", "gap 1 0", "record", "two", "three"]);
        // An end of a line is lost as well: two lines become one.
        let mut bad = bytes.clone();
        bad[at + 3] = b' ';
        assert_eq!(texts(&read(&bad)), ["record", "head", "gap 1 1", "two", "three"]);
        // Without its first line.
        let first = bytes.iter().position(|b| *b == b'\n').unwrap();
        let mut bad = bytes;
        bad[..first].fill(0);
        assert_eq!(texts(&read(&bad)), ["gap 0 1", "head", "one", "record", "two", "three"]);
    }

    #[test]
    fn a_line_of_another_log_does_not_follow() {
        let (bytes, ends) = sample();
        let (other, _) = sealed(Place { number: 2, journaled: 1, chain: 7 }, &[journal("alien")]);
        let mut mixed = bytes[..ends[0]].to_vec();
        mixed.extend(other);
        let reading = read(&mixed);
        assert_eq!((texts(&reading).len(), reading.tail), (2, Tail::Damaged));
    }
}
