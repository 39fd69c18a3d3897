//! How the SMs of a GPU are divided among the tasks of a set.

use crate::api::job_file::shown;
use crate::protocol::SmRange;
use roommate_core::measurement::advice::Way;
use roommate_core::measurement::search::GRAIN;
use serde::Deserialize;
use yaml_serde::Value;

/// Splits are found while measuring.
const SEARCH: &str = "search";

/// The splits of a set.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Splits {
    /// These splits.
    These(Vec<Split>),
    /// Splits that follow from the measurements.
    Search,
}

/// The SMs of each task.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub(super) enum Split {
    /// SMs of the first task; all other tasks share the rest.
    First(u32),
    /// SMs of each task; all SMs = not confined.
    Each(Vec<u32>),
    /// One task has priority.
    Ahead(Ahead),
}

/// A task with priority, and the SMs of each task where some are confined as well.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Ahead {
    /// Its index in the set.
    first: usize,
    sms: Option<Vec<u32>>,
}

impl From<&Way> for Split {
    fn from(Way { first, sms }: &Way) -> Self {
        match first {
            Some(first) => Self::Ahead(Ahead { first: *first, sms: sms.clone() }),
            None => Self::Each(sms.clone().unwrap_or_default()),
        }
    }
}

impl Default for Splits {
    fn default() -> Self {
        Self::These(Vec::new())
    }
}

impl Splits {
    /// The splits for all sets, as far as they apply to a set of this size.
    pub(super) fn for_set(&self, members: usize, services: usize) -> Self {
        let fits = |s: &&Split| match s {
            Split::First(_) => true,
            Split::Each(each) => each.len() == members,
            Split::Ahead(Ahead { first, sms }) => {
                services == 0
                    && *first < members
                    && sms.as_ref().is_none_or(|each| each.len() == members)
            }
        };
        match self {
            Self::These(splits) => Self::These(splits.iter().filter(fits).cloned().collect()),
            Self::Search if services > 0 => Self::default(),
            Self::Search => Self::Search,
        }
    }
}

impl<'de> Deserialize<'de> for Splits {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(from)?;
        let wrong = |found| {
            let what = format!("splits: expected a list or `{SEARCH}`, found {found}");
            serde::de::Error::custom(what)
        };
        match value {
            Value::String(word) if word == SEARCH => Ok(Self::Search),
            Value::Sequence(_) => {
                let found = shown(&value);
                yaml_serde::from_value(value).map(Self::These).map_err(|_| wrong(found))
            }
            other => Err(wrong(shown(&other))),
        }
    }
}

/// Whether a range of this many SMs is possible.
pub(super) fn group(sms: u32, all: u32) -> Result<(), String> {
    if sms == 0 || sms > all || !sms.is_multiple_of(GRAIN) {
        return Err(format!("expected a multiple of {GRAIN} up to {all}, found {sms}"));
    }
    Ok(())
}

impl Split {
    /// Index of the task with priority.
    pub(super) fn first(&self) -> Option<usize> {
        if let Self::Ahead(Ahead { first, .. }) = self { Some(*first) } else { None }
    }

    /// The SM range of each member; `None` = the whole GPU.
    pub(super) fn seats(&self, members: usize, all: u32) -> Result<Vec<Option<SmRange>>, String> {
        let seat = |first: u32, sms: u32| Some(SmRange { first: first as u16, sms: sms as u16 });
        let each = match self {
            Self::First(sms) => {
                group(*sms, all)?;
                if *sms == all {
                    return Err(format!("{sms} SMs for the first leave nothing for other tasks"));
                }
                let rest = seat(*sms, all - sms);
                return Ok(std::iter::once(seat(0, *sms)).chain(vec![rest; members - 1]).collect());
            }
            Self::Each(each) => each,
            Self::Ahead(Ahead { first, .. }) if *first >= members => {
                return Err(format!("first: expected an index below {members}, found {first}"));
            }
            Self::Ahead(Ahead { sms: None, .. }) => return Ok(vec![None; members]),
            Self::Ahead(Ahead { sms: Some(each), .. }) => each,
        };
        if each.len() != members {
            return Err(format!("{} numbers for {members} tasks", each.len()));
        }
        if each.iter().all(|sms| *sms == all) {
            return Err(format!("{all} SMs for each is not a split"));
        }
        if each.contains(&all) {
            // Confined tasks run beside at least one that is not confined.
            let place = |sms: &u32| {
                if *sms == all { Ok(None) } else { group(*sms, all).map(|()| seat(0, *sms)) }
            };
            return each.iter().map(place).collect();
        }
        // Two ranges: tasks with equal numbers share a range.
        let front = each.iter().find(|sms| sms.is_multiple_of(GRAIN)).copied();
        if let Some(front) = front
            && front > 0
            && each.iter().any(|sms| *sms != front)
            && each.iter().all(|sms| *sms == front || sms + front == all)
        {
            let place = |sms: &u32| seat(if *sms == front { 0 } else { front }, *sms);
            return Ok(each.iter().map(place).collect());
        }
        let mut first = 0;
        let mut seats = Vec::new();
        for (i, sms) in each.iter().enumerate() {
            // The last range need not consist of whole groups.
            if i + 1 < members || first + sms != all {
                group(*sms, all)?;
            }
            seats.push(seat(first, *sms));
            first += sms;
        }
        if first > all {
            return Err(format!("{first} SMs together, of {all}"));
        }
        Ok(seats)
    }
}
