//! The journal, put together from the log and its readable copy.

use crate::daemon::store::copy;
use crate::daemon::store::count;
use crate::daemon::store::log::{Gap, Item, Reading, Tail};
use crate::daemon::store::seal::Kind;

/// The journal as far as it is known.
pub(super) struct Journal<'a> {
    /// Its lines, without those that are lost.
    pub(super) lines: Vec<&'a [u8]>,
    /// Lines that are lost from the log and were found in the copy.
    pub(super) filled: usize,
    /// Lines that are lost.
    pub(super) holes: usize,
    /// Lines at the end that only the copy has.
    pub(super) taken_back: usize,
    /// Records of the store that are lost.
    pub(super) lost_records: usize,
}

impl<'a> Journal<'a> {
    pub(super) fn assemble(reading: &Reading<'a>, copied: &[&'a [u8]], copy: &copy::Found) -> Self {
        let lines = Vec::with_capacity(reading.end.journaled as usize);
        let mut journal = Self { lines, filled: 0, holes: 0, taken_back: 0, lost_records: 0 };
        for (i, item) in reading.items.iter().enumerate() {
            match item {
                Item::Line(line) if line.kind == Kind::Journal => journal.lines.push(line.text),
                Item::Line(_) => {}
                Item::Gap(gap) => {
                    journal.lost_records += gap.records();
                    journal.fill(gap, copied, next_line(&reading.items[i..]));
                }
            }
        }
        let known = journal.lines.len() + journal.holes;
        let goes_on = if journal.holes == 0 {
            copied.starts_with(&journal.lines)
        } else {
            known > 0 && copied.get(known - 1) == journal.lines.last()
        };
        if goes_on {
            let beyond = copy.beyond(copied, known);
            journal.taken_back = beyond.len();
            journal.lines.extend(beyond);
        }
        journal
    }

    /// Fills a gap from the copy, if the lines there are those that were lost.
    fn fill(&mut self, gap: &Gap, copied: &[&'a [u8]], next: Option<&[u8]>) {
        let (from, lost) = (gap.from.journaled as usize, gap.journaled());
        if lost == 0 {
            return;
        }
        let candidates = copied.get(from..from + lost).filter(|lines| {
            if gap.from.number == 0 {
                // The chain begins with the first line of the log, which is lost too.
                return next.is_some() && copied.get(from + lost).copied() == next;
            }
            let end = lines.iter().fold(gap.from, |at, line| at.after(Kind::Journal, line));
            end.chain == gap.to.chain
        });
        match candidates {
            Some(lines) => {
                self.filled += lost;
                self.lines.extend(lines);
            }
            None => self.holes += lost,
        }
    }

    /// Whether the log differs from what was written to it.
    pub(super) fn is_damaged(&self) -> bool {
        self.filled + self.holes + self.taken_back + self.lost_records > 0
    }

    /// What was wrong, for people.
    pub(super) fn describe(&self, reading: &Reading<'_>, bytes: usize, notices: &mut Vec<String>) {
        let lines = |n: usize| count(n, "line");
        let beyond = bytes - reading.length;
        match reading.tail {
            Tail::Damaged if beyond == 0 => notices.push("the end of the log was damaged".into()),
            Tail::Damaged => {
                notices.push(format!("the last {beyond} bytes of the log were damaged"));
            }
            Tail::Torn => notices.push(format!(
                "the last {beyond} bytes of the log were a transaction that was not finished; it \
                 was removed"
            )),
            Tail::None => {}
        }
        if self.taken_back > 0 {
            let n = lines(self.taken_back);
            notices.push(format!("the log had lost {n} at its end, taken from journal.jsonl"));
        }
        if self.filled > 0 {
            let n = lines(self.filled);
            notices.push(format!("{n} of the log were damaged, and taken from journal.jsonl"));
        }
        if self.holes > 0 {
            let n = lines(self.holes);
            notices.push(format!("{n} of the log and of journal.jsonl could not be read"));
        }
    }

    /// The lines as a file.
    pub(super) fn text(&self) -> Vec<u8> {
        let length: usize = self.lines.iter().map(|line| line.len() + 1).sum();
        let mut text = Vec::with_capacity(length);
        for line in &self.lines {
            text.extend_from_slice(line);
            text.push(b'\n');
        }
        text
    }

    /// Time of the last step, in µs.
    pub(super) fn last_at(&self) -> u64 {
        let at = |line: &&[u8]| -> Option<u64> {
            let digits = line.strip_prefix(b"{\"step\":{\"at\":")?;
            let length = digits.iter().take_while(|b| b.is_ascii_digit()).count();
            std::str::from_utf8(&digits[..length]).ok()?.parse().ok()
        };
        self.lines.iter().rev().find_map(at).unwrap_or(0)
    }
}

/// The next line of the journal.
fn next_line<'a>(items: &[Item<'a>]) -> Option<&'a [u8]> {
    items.iter().find_map(|item| match item {
        Item::Line(line) if line.kind == Kind::Journal => Some(line.text),
        _ => None,
    })
}
