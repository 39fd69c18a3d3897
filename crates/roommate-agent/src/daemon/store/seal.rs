//! Sealed lines: text with a seal that shows whether the line, and its place among the others, is
//! what was written.
//!
//! ```text
//!  17 12 5f3a…c1 9b07…e4 j. {"step":{...}}
//!  │  │  │       │       ││
//!  │  │  │       │       │└ `.` the transaction ends here, `,` it goes on
//!  │  │  │       │       └ `j` a line of the journal, `r` a record of the store
//!  │  │  │       └ checksum of everything else in this line
//!  │  │  └ chain: checksum of the log's first line and all lines of the journal before this one
//!  │  └ lines of the journal before this one
//!  └ lines of the log before this one
//! ```
//!
//! A line verifies by itself, so that lines after a damaged one are still known to be good. The
//! chain contains what the readable copy of the journal contains and nothing else, so that lines
//! lost from the log can be taken from the copy and checked: they are right if they lead from the
//! chain before the damage to the chain after it.
//!
//! The checksum is FNV-1a of 64 bits over the text, then over the fields as words. Each step of
//! FNV-1a is a bijection of the hash for a given input, so two lines that differ in a single byte,
//! or in a single field, never have the same sum, and other damage stays unseen with a probability
//! of 2^-64. It is no protection against somebody who may write into the folder.

use roommate_core::math::hash::{fnv1a, words};
use std::io::Write;

/// What a line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A line of the journal.
    Journal,
    /// A record of the store.
    Record,
}

/// A line that was verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Line<'a> {
    /// Where it stands.
    pub(super) place: Place,
    pub(super) kind: Kind,
    /// Whether a transaction ends with it.
    pub(super) commits: bool,
    pub(super) text: &'a [u8],
}

/// A place in a log, between two lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    /// Lines before it.
    pub(super) number: u64,
    /// Lines of the journal before it.
    pub(super) journaled: u64,
    /// The chain up to it.
    pub(super) chain: u64,
}

impl Place {
    /// The place after a line.
    pub(super) fn after(self, kind: Kind, text: &[u8]) -> Self {
        self.after_hashed(kind, fnv1a(text))
    }

    fn after_hashed(self, kind: Kind, text: u64) -> Self {
        let Self { number, journaled, chain } = self;
        let counts = u64::from(kind == Kind::Journal);
        // The first line is in the chain because no two logs have the same.
        let chained = counts == 1 || number == 0;
        let chain = if chained { words([chain, text]) } else { chain };
        Self { number: number + 1, journaled: journaled + counts, chain }
    }

    fn sum(self, kind: Kind, commits: bool, text: u64) -> u64 {
        let marks = u64::from(kind == Kind::Journal) * 2 + u64::from(commits);
        words([self.number, self.journaled, self.chain, marks, text])
    }

    /// Writes a sealed line, and returns the place after it.
    pub(super) fn seal(self, kind: Kind, commits: bool, text: &[u8], to: &mut Vec<u8>) -> Self {
        let hashed = fnv1a(text);
        let Self { number, journaled, chain } = self;
        let sum = self.sum(kind, commits, hashed);
        let kind_mark = if kind == Kind::Journal { 'j' } else { 'r' };
        let end_mark = if commits { '.' } else { ',' };
        let seal = format_args!("{number} {journaled} {chain:016x} {sum:016x} ");
        let written = write!(to, "{seal}{kind_mark}{end_mark} ");
        debug_assert!(written.is_ok(), "memory can always be written to");
        to.extend_from_slice(text);
        to.push(b'\n');
        self.after_hashed(kind, hashed)
    }
}

/// The line, if its seal is right; with or without the end of the line.
pub(super) fn verify(line: &[u8]) -> Option<Line<'_>> {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    let mut fields = line.splitn(6, |b| *b == b' ');
    let mut field = || std::str::from_utf8(fields.next()?).ok();
    let (number, journaled) = (field()?.parse().ok()?, field()?.parse().ok()?);
    let chain = u64::from_str_radix(field()?, 16).ok()?;
    let sum = u64::from_str_radix(field()?, 16).ok()?;
    let (kind, commits) = match field()? {
        "j," => (Kind::Journal, false),
        "j." => (Kind::Journal, true),
        "r," => (Kind::Record, false),
        "r." => (Kind::Record, true),
        _ => return None,
    };
    let text = fields.next()?;
    let place = Place { number, journaled, chain };
    (place.sum(kind, commits, fnv1a(text)) == sum).then_some(Line { place, kind, commits, text })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_flipped_bit_verifies_as_another_line() {
        let place = Place { number: 17, journaled: 12, chain: 0x5f3a };
        let mut bytes = Vec::new();
        place.seal(Kind::Journal, true, br#"{"step":{"at":5}}"#, &mut bytes);
        let whole = verify(&bytes).unwrap();
        assert_eq!((whole.place, whole.text), (place, &br#"{"step":{"at":5}}"#[..]));
        for bit in 0..8 * bytes.len() {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            // A digit of a sum in capitals is the same digit.
            assert!(verify(&bad).is_none_or(|found| found == whole), "bit {bit}");
        }
    }

    #[test]
    fn only_the_first_line_and_the_journal_are_in_the_chain() {
        let first = Place::default().after(Kind::Record, b"first");
        assert_eq!(first, Place { number: 1, journaled: 0, chain: first.chain });
        assert_ne!(first.chain, Place::default().after(Kind::Record, b"other").chain);
        let record = first.after(Kind::Record, b"record");
        assert_eq!((record.number, record.chain), (2, first.chain));
        let line = record.after(Kind::Journal, b"line");
        assert_eq!((line.number, line.journaled), (3, 1));
        assert_ne!(line.chain, record.chain);
    }
}
