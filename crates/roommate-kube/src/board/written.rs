//! A piece of the scheduler's journal, as it is told while it grows.

use roommate_agent::process::rotated_file::Place;
use roommate_core::time::Time;
use serde::{Deserialize, Serialize};

/// The path under which the scheduler tells it; the part and the place follow.
pub(crate) const PATH: &str = "/debug/journal/";
/// Behind everything: nothing but the time is asked.
pub(crate) const NOW: Place = Place { part: u64::MAX, at: u64::MAX };
/// The beginning of the part that grows.
pub(crate) const BEGINNING: Place = Place { part: u64::MAX, at: 0 };
/// Bytes of a piece, unless a single line is longer.
const LONGEST: usize = 1 << 20;

/// What was written of the journal from a place on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Written {
    /// The scheduler's time in seconds.
    pub now_s: f64,
    /// Whole lines.
    pub lines: String,
    /// The place behind them.
    pub next: Place,
    /// What waits and is not in the journal, if only the time was asked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outside: Vec<Outside>,
}

/// Pods that wait for something else than GPUs: for a node that they may use, or for their queue.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Outside {
    /// The name that the journal will have for them.
    pub name: String,
    /// GPUs that they ask for.
    pub gpus: u16,
    /// Since when, in seconds.
    pub since_s: f64,
    /// What they were told.
    pub why: String,
}

impl Written {
    /// Cuts a piece out of the journal of a part; `journal` hands it over where it is.
    pub(crate) fn of(
        journal: impl FnOnce(&mut dyn FnMut(&[u8])),
        (term, part): (u64, u64),
        from: Place,
        now: Time,
    ) -> Result<Self, String> {
        // Another leader counts its parts anew.
        let part = term << 32 | part;
        let at = if from.part == part || from == NOW { from.at } else { 0 };
        let mut found = None;
        journal(&mut |all| {
            let rest = usize::try_from(at).ok().and_then(|at| all.get(at..)).unwrap_or_default();
            let ends = |bytes: &[u8]| bytes.iter().rposition(|b| *b == b'\n');
            let end = ends(&rest[..rest.len().min(LONGEST)]);
            let end = end.or_else(|| rest.iter().position(|b| *b == b'\n'));
            let lines = &rest[..end.map_or(0, |last| last + 1)];
            found = Some(String::from_utf8_lossy(lines).into_owned());
        });
        let lines = found.ok_or("nothing was decided: no node has GPUs for this scheduler")?;
        let next = Place { part, at: at.saturating_add(lines.len() as u64) };
        Ok(Self { now_s: now.secs(), lines, next, outside: Vec::new() })
    }
}

/// The path for a place.
pub(crate) fn path(from: Place) -> String {
    format!("{PATH}{}/{}", from.part, from.at)
}

/// The place in a path.
pub(crate) fn place(path: &str) -> Option<Place> {
    let (part, at) = path.strip_prefix(PATH)?.split_once('/')?;
    Some(Place { part: part.parse().ok()?, at: at.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(journal: &[u8], part: u64, from: Place) -> Written {
        Written::of(|read| read(journal), (1, part), from, Time::from_secs(5.0)).unwrap()
    }

    #[test]
    fn a_journal_is_told_in_whole_lines_as_it_grows() {
        let first = read(b"a\nb\nhal", 2, BEGINNING);
        assert_eq!((first.lines.as_str(), first.now_s), ("a\nb\n", 5.0));
        let next = read(b"a\nb\nhalf\n", 2, first.next);
        assert_eq!(next.lines, "half\n");
        assert_eq!(read(b"a\nb\nhalf\n", 2, next.next).lines, "");
        assert_eq!(read(b"other\n", 3, next.next).lines, "other\n");
        assert_eq!(read(b"a\n", 2, NOW).lines, "");
        let long = [vec![b'x'; LONGEST + 9], b"\nb\n".to_vec()].concat();
        assert_eq!(read(&long, 2, BEGINNING).lines.len(), LONGEST + 10);
        let none = Written::of(|_| {}, (1, 0), BEGINNING, Time::ZERO);
        assert!(none.unwrap_err().starts_with("nothing was decided"));
    }

    #[test]
    fn a_place_is_read_from_the_path_that_was_made_of_it() {
        for at in [BEGINNING, NOW, Place { part: 7, at: 9 }] {
            assert_eq!(place(&path(at)), Some(at));
        }
        assert_eq!(place("/debug/journal/1"), None);
        assert_eq!(place("/debug/journal/1/x"), None);
    }
}
