//! How the multiprocessors of a GPU are divided among the tasks of a set.

use crate::api::job_file::shown;
use crate::protocol::SmRange;
use roommate_core::measurement::search::GRAIN;
use serde::Deserialize;
use yaml_serde::Value;

/// Splits that are found while measuring.
const SEARCH: &str = "search";

/// How the multiprocessors are split for a set.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Splits {
    /// In these ways.
    These(Vec<Split>),
    /// In ways that follow from what was measured.
    Search,
}

/// Who has which multiprocessors.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub(super) enum Split {
    /// So many for the first, and the rest for all others together.
    First(u32),
    /// So many for each; all of them = it is not confined.
    Each(Vec<u32>),
}

impl Default for Splits {
    fn default() -> Self {
        Self::These(Vec::new())
    }
}

impl Splits {
    /// What was said for all sets, as far as it is for one like this.
    pub(super) fn for_set(&self, members: usize, services: usize) -> Self {
        let fits = |s: &&Split| match s {
            Split::First(_) => true,
            Split::Each(each) => each.len() == members,
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

/// Whether a part of so many multiprocessors can be made.
pub(super) fn group(sms: u32, all: u32) -> Result<(), String> {
    if sms == 0 || sms > all || !sms.is_multiple_of(GRAIN) {
        return Err(format!("expected a multiple of {GRAIN} up to {all}, found {sms}"));
    }
    Ok(())
}

impl Split {
    /// Where each member sits; `None` = everywhere.
    pub(super) fn seats(&self, members: usize, all: u32) -> Result<Vec<Option<SmRange>>, String> {
        let seat = |first: u32, sms: u32| Some(SmRange { first: first as u16, sms: sms as u16 });
        let each = match self {
            Self::First(sms) => {
                group(*sms, all)?;
                if *sms == all {
                    return Err(format!("{sms} SMs for the first leave nothing for the others"));
                }
                let rest = seat(*sms, all - sms);
                return Ok(std::iter::once(seat(0, *sms)).chain(vec![rest; members - 1]).collect());
            }
            Self::Each(each) => each,
        };
        if each.len() != members {
            return Err(format!("{} numbers for {members} tasks", each.len()));
        }
        if each.iter().all(|sms| *sms == all) {
            return Err(format!("{all} SMs for each is no split"));
        }
        if each.contains(&all) {
            // Whoever is confined is so beside somebody who is not.
            let place = |sms: &u32| {
                if *sms == all { Ok(None) } else { group(*sms, all).map(|()| seat(0, *sms)) }
            };
            return each.iter().map(place).collect();
        }
        // Two parts: who has as many as another has the same ones.
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
            // What is left at the end need not be a whole group.
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
