//! What was learned of kinds of work, kept in a file beside the state: how much they slow each
//! other, how much GPU memory they used, how long jobs were. A new part of the journal begins with
//! it, in its head, so that a replay knows what the policy knew.
//!
//! Each line is JSON behind a checksum of it. A damaged line is skipped, and said; the rest counts.
//! The file is replaced as a whole. It is no part of the state: without it a daemon only learns
//! again.

use crate::AgentError;
use crate::daemon::lock::Lock;
use crate::os::disk::{Disk, RealDisk, replace};
use crate::paths::Paths;
use roommate_core::idx::{Idx, IdxVec, ProfileIdx};
use roommate_core::journal::{self, Head, LearnedPair, LearnedStep, ProfileLine};
use roommate_core::math::hash::fnv1a;
use roommate_core::number::{Number, Positive};
use roommate_core::profile::Profile;
use roommate_core::state::State;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io;
use std::path::Path;

/// Version of the format; a file of a later one is left alone.
const VERSION: u32 = 1;
/// Longest file that is read.
const LONGEST: u64 = 8 << 20;
/// Most kinds of work that are kept, those used last; a journal begins with fewer.
const MOST_KINDS: usize = 512;
const MOST_IN_JOURNAL: usize = 128;
/// Most pairs that are kept, those with most samples.
const MOST_PAIRS: usize = 8192;
/// Most finished jobs that count; beyond, older ones count for half.
const MOST_LENGTHS: u32 = 4000;
/// Lengths of jobs are kept in bins, each longer than the last by this factor.
const BIN: f64 = 1.2;
const BINS: u8 = 96;
/// Samples beyond which more say nothing new.
const MOST_SAMPLES: u32 = 1000;
/// Policies that begin with what was learned.
const USERS: &[&str] = &["roommate"];

/// Whether this policy uses what was learned.
pub(crate) fn is_used_by(policy: &str) -> bool {
    USERS.contains(&policy)
}

/// A kind of work.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kind {
    /// Its name, that of a profile.
    pub name: String,
    /// When a job of it was last seen, seconds since 1970.
    pub seen_unix_s: u64,
    /// Jobs that finished.
    #[serde(default)]
    pub jobs: u32,
    /// Their mean length in seconds of undisturbed run.
    #[serde(default)]
    pub mean_s: Number,
    /// Most GPU memory that a job of it held, per GPU; 0 = not known.
    #[serde(default)]
    pub mem_mib: u32,
    /// What its job files declare.
    pub profile: Profile,
    /// Lengths of its steps alone, where its job files declare none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<Step>,
}

/// The length of a step alone on a GPU model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// The GPU model.
    pub gpu_model: String,
    /// Seconds.
    pub step_s: Positive,
    /// Standard error, relative to it.
    pub error: Number,
    /// Number of samples.
    pub samples: u32,
}

/// How much a kind of work suffers beside another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pair {
    /// The GPU model.
    pub gpu_model: String,
    /// The kind that suffers.
    pub own: String,
    /// Its roommate.
    pub beside: String,
    /// Length of a step relative to alone, minus 1.
    pub extra: Number,
    /// Number of samples.
    pub samples: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    Version(u32),
    Kind(Box<Kind>),
    Pair(Pair),
    /// Number of finished jobs by bin of their length.
    Lengths(BTreeMap<u8, u32>),
}

type PairKey = (String, String, String);

/// What was learned.
#[derive(Clone, Debug, Default)]
pub struct Learned {
    kinds: BTreeMap<String, Kind>,
    pairs: BTreeMap<PairKey, Pair>,
    lengths: BTreeMap<u8, u32>,
    /// What was wrong with the file.
    pub notices: Vec<String>,
    /// Whether the file is of a later version, and must not be replaced.
    is_foreign: bool,
    has_changed: bool,
}

impl Learned {
    /// Reads the file. What cannot be read is not known, and said.
    pub(crate) fn read(disk: &dyn Disk, path: &Path) -> Self {
        match disk.read(path, LONGEST) {
            Ok(bytes) => Self::parse(&bytes, path),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Self::default(),
            Err(e) => {
                let what = format!("what was learned earlier could not be read: {e}");
                Self { notices: vec![what], ..Self::default() }
            }
        }
    }

    /// Reads the file of a state, for people.
    pub fn of(path: &Path) -> Self {
        Self::read(&RealDisk, path)
    }

    fn parse(bytes: &[u8], path: &Path) -> Self {
        let mut found = Self::default();
        let mut damaged = 0;
        let lines = bytes.split(|b| *b == b'\n').filter(|line| !line.is_empty());
        for line in lines {
            match unsealed(line) {
                Some(Line::Version(version)) if version > VERSION => {
                    let what = format!(
                        "{} is of a later version: it is neither used nor changed",
                        path.display()
                    );
                    return Self { notices: vec![what], is_foreign: true, ..Self::default() };
                }
                Some(Line::Version(_)) => {}
                Some(Line::Kind(kind)) if kind.profile.check().is_ok() => {
                    found.kinds.insert(kind.name.clone(), *kind);
                }
                Some(Line::Pair(pair)) => {
                    found.pairs.insert(key(&pair), pair);
                }
                Some(Line::Lengths(lengths)) => found.lengths = lengths,
                Some(Line::Kind(_)) | None => damaged += 1,
            }
        }
        if damaged > 0 {
            let lines = if damaged == 1 { "line" } else { "lines" };
            found.notices.push(format!(
                "{damaged} damaged {lines} of {} skipped: what they said is learned again",
                path.display()
            ));
            found.has_changed = true;
        }
        found.shrink();
        found
    }

    /// Writes the file, if something has changed.
    pub(crate) fn save(&mut self, disk: &dyn Disk, path: &Path) -> io::Result<()> {
        if !self.has_changed || self.is_foreign {
            return Ok(());
        }
        self.shrink();
        let kinds = self.kinds.values().cloned().map(|kind| Line::Kind(Box::new(kind)));
        let pairs = self.pairs.values().cloned().map(Line::Pair);
        let lengths = Line::Lengths(self.lengths.clone());
        let mut text = String::new();
        for line in [Line::Version(VERSION), lengths].into_iter().chain(kinds).chain(pairs) {
            let json = serde_json::to_string(&line).map_err(io::Error::other)?;
            let _ = writeln!(text, "{:016x} {json}", fnv1a(json.as_bytes()));
        }
        replace(disk, path, text.as_bytes())?;
        self.has_changed = false;
        Ok(())
    }

    /// Forgets the kinds that were not seen for longest, and the pairs with fewest samples.
    fn shrink(&mut self) {
        let kept: BTreeSet<String> = self.latest(MOST_KINDS).map(|k| k.name.clone()).collect();
        self.kinds.retain(|name, _| kept.contains(name));
        self.pairs.retain(|_, p| kept.contains(&p.own) && kept.contains(&p.beside));
        if self.pairs.len() > MOST_PAIRS {
            let mut samples: Vec<u32> = self.pairs.values().map(|p| p.samples).collect();
            samples.sort_unstable_by(|a, b| b.cmp(a));
            let least = samples[MOST_PAIRS];
            self.pairs.retain(|_, p| p.samples > least);
        }
        self.lengths.retain(|bin, _| *bin <= BINS);
        if self.lengths.values().map(|n| u64::from(*n)).sum::<u64>() > MOST_LENGTHS.into() {
            self.lengths.values_mut().for_each(|n| *n /= 2);
            self.lengths.retain(|_, n| *n > 0);
        }
    }

    fn latest(&self, most: usize) -> impl Iterator<Item = &Kind> {
        let mut kinds: Vec<&Kind> = self.kinds.values().collect();
        kinds.sort_by(|a, b| b.seen_unix_s.cmp(&a.seen_unix_s).then(a.name.cmp(&b.name)));
        kinds.into_iter().take(most)
    }

    /// The kinds of work, those seen last first.
    pub fn kinds(&self) -> Vec<&Kind> {
        self.latest(usize::MAX).collect()
    }

    /// What was learned of pairs.
    pub fn pairs(&self) -> impl Iterator<Item = &Pair> {
        self.pairs.values()
    }

    /// Lengths of finished jobs: seconds, number of jobs.
    pub fn lengths(&self) -> impl Iterator<Item = (f64, u32)> {
        self.lengths.iter().map(|(bin, jobs)| (BIN.powf(f64::from(*bin) + 0.5), *jobs))
    }

    /// GPU memory that a job of this kind is expected to need; `None` = not known.
    pub(crate) fn mem_mib(&self, kind: &str) -> Option<u32> {
        self.kinds.get(kind).map(|k| k.mem_mib).filter(|m| *m > 0)
    }

    /// A job of this kind was submitted.
    pub(crate) fn note_kind(&mut self, name: &str, profile: &Profile, now_unix_s: u64) {
        let kind = self.kinds.entry(name.into()).or_insert_with(|| Kind {
            name: name.into(),
            seen_unix_s: now_unix_s,
            jobs: 0,
            mean_s: Number::of(0.0),
            mem_mib: 0,
            profile: profile.clone(),
            steps: Vec::new(),
        });
        (kind.seen_unix_s, kind.profile) = (now_unix_s, profile.clone());
        self.has_changed = true;
    }

    /// A job of this kind held this much memory of each of its GPUs.
    pub(crate) fn note_memory(&mut self, kind: &str, mem_mib: u32) {
        if let Some(kind) = self.kinds.get_mut(kind).filter(|k| k.mem_mib < mem_mib) {
            kind.mem_mib = mem_mib;
            self.has_changed = true;
        }
    }

    /// A job of this kind finished after so many seconds of undisturbed run.
    pub(crate) fn note_length(&mut self, kind: &str, length_s: f64) {
        if !length_s.is_finite() || length_s < 0.0 {
            return;
        }
        let bin = (length_s.max(1.0).ln() / BIN.ln()).min(f64::from(BINS)) as u8;
        *self.lengths.entry(bin).or_default() += 1;
        if let Some(kind) = self.kinds.get_mut(kind) {
            kind.jobs = kind.jobs.saturating_add(1);
            let mean = kind.mean_s.get();
            kind.mean_s = Number::of(mean + (length_s - mean) / f64::from(kind.jobs));
        }
        self.has_changed = true;
    }

    /// Takes over what the engine learned of pairs.
    pub(crate) fn take_in(
        &mut self,
        state: &State,
        head: &Head,
        names: &IdxVec<ProfileIdx, String>,
    ) {
        let model_of = |gpu_model: u8| head.cluster.gpu_models.get(usize::from(gpu_model));
        for (profile, solo) in state.solo.iter_enumerated() {
            let kind = names.get(profile).and_then(|name| self.kinds.get_mut(name));
            let Some(kind) = kind.filter(|_| state.profiles[profile].step_unknown) else {
                continue;
            };
            for (gpu_model, average) in solo.alone() {
                let Some(model) = model_of(*gpu_model) else { continue };
                let step = Step {
                    gpu_model: model.name.clone(),
                    step_s: Positive::of(average.mean),
                    error: Number::of(average.error()),
                    samples: average.samples.min(MOST_SAMPLES),
                };
                kind.steps.retain(|s| s.gpu_model != model.name);
                kind.steps.push(step);
                self.has_changed = true;
            }
        }
        for (gpu_model, own, other, extra) in state.pairs.iter() {
            let model = model_of(gpu_model);
            let (Some(model), Some(own), Some(beside)) = (model, names.get(own), names.get(other))
            else {
                continue;
            };
            if !self.kinds.contains_key(own) || !self.kinds.contains_key(beside) {
                continue;
            }
            let pair = Pair {
                gpu_model: model.name.clone(),
                own: own.clone(),
                beside: beside.clone(),
                extra: Number::of(extra.mean),
                samples: extra.samples.min(MOST_SAMPLES),
            };
            let known = self.pairs.get(&key(&pair));
            if known.is_none_or(|known| known.samples <= pair.samples && *known != pair) {
                self.pairs.insert(key(&pair), pair);
                self.has_changed = true;
            }
        }
    }

    /// What a journal of this policy begins with: the profiles to register after those that are
    /// there, and what is known of them, for its head.
    pub(crate) fn for_journal(
        &self,
        head: &Head,
        there: &[ProfileLine],
    ) -> (Option<journal::Learned>, Vec<ProfileLine>) {
        if !is_used_by(&head.policy) || (self.kinds.is_empty() && self.lengths.is_empty()) {
            return (None, Vec::new());
        }
        let mut index: BTreeMap<&str, ProfileIdx> = BTreeMap::new();
        for line in there {
            index.entry(&line.name).or_insert(line.idx);
        }
        let mut fresh = Vec::new();
        for kind in self.latest(MOST_IN_JOURNAL) {
            if index.contains_key(kind.name.as_str()) {
                continue;
            }
            let idx = ProfileIdx::from_usize(there.len() + fresh.len());
            let (name, profile) = (kind.name.clone(), kind.profile.clone());
            fresh.push(ProfileLine { idx, name, profile });
            index.insert(&kind.name, idx);
        }
        let models = &head.cluster.gpu_models;
        let pair = |p: &Pair| {
            let gpu_model = models.iter().position(|m| m.name == p.gpu_model)? as u8;
            let (own, other) = (*index.get(&*p.own)?, *index.get(&*p.beside)?);
            Some(LearnedPair { gpu_model, own, other, extra: p.extra, samples: p.samples })
        };
        let pairs = self.pairs.values().filter_map(pair).collect();
        let lengths = self.lengths().map(|(s, jobs)| (Number::of(s), jobs)).collect();
        let mut steps = Vec::new();
        for kind in self.kinds.values() {
            let Some(profile) = index.get(kind.name.as_str()).copied() else { continue };
            steps.extend(kind.steps.iter().filter_map(|s| {
                let gpu_model = models.iter().position(|m| m.name == s.gpu_model)? as u8;
                let Step { step_s, error, samples, .. } = *s;
                Some(LearnedStep { profile, gpu_model, step_s, error, samples })
            }));
        }
        (Some(journal::Learned { pairs, steps, lengths }), fresh)
    }
}

/// Removes the file. A daemon would write what it knows again, so that none may run.
pub fn forget(paths: &Paths, file: &Path) -> Result<(), AgentError> {
    let _lock = if paths.root().is_dir() { Some(Lock::take(paths)?) } else { None };
    match RealDisk.remove(file) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(AgentError::file("remove", file)(e)),
        _ => Ok(()),
    }
}

fn key(pair: &Pair) -> PairKey {
    (pair.gpu_model.clone(), pair.own.clone(), pair.beside.clone())
}

fn unsealed(line: &[u8]) -> Option<Line> {
    let (sum, rest) = line.split_at_checked(16)?;
    let json = rest.strip_prefix(b" ")?;
    // As it was written: a digit may not become another that means the same.
    (sum == format!("{:016x}", fnv1a(json)).as_bytes())
        .then(|| serde_json::from_slice(json).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled() -> Learned {
        let mut learned = Learned::default();
        learned.note_kind("a", &Profile::of_step(1.0), 5);
        learned.note_kind("b", &Profile::of_step(1.0), 6);
        learned.note_memory("a", 900);
        learned.note_length("a", 30.0);
        learned.note_length("a", 50.0);
        let [own, beside, gpu_model] = ["a", "b", "cpu"].map(String::from);
        let pair = Pair { gpu_model, own, beside, extra: Number::of(0.5), samples: 3 };
        learned.pairs.insert(key(&pair), pair);
        learned
    }

    #[test]
    fn a_file_reads_back_and_a_damaged_line_costs_only_itself() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("learned.jsonl");
        filled().save(&RealDisk, &path).unwrap();
        let whole = Learned::read(&RealDisk, &path);
        assert_eq!((whole.kinds.len(), whole.pairs.len(), whole.mem_mib("a")), (2, 1, Some(900)));
        assert_eq!(whole.kinds["a"].mean_s.get(), 40.0);
        let lengths: Vec<(f64, u32)> = whole.lengths().collect();
        assert_eq!(lengths.len(), 2);
        assert!((lengths[0].0 / 30.0 - 1.0).abs() < 0.2, "{lengths:?}");
        assert!(whole.notices.is_empty(), "{:?}", whole.notices);
        // Every byte in turn: the file is read, and what is not damaged counts.
        let bytes = std::fs::read(&path).unwrap();
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            let read = Learned::parse(&damaged, &path);
            // A line break costs the lines on both sides of it.
            assert!(!read.kinds.is_empty() || !read.lengths.is_empty(), "byte {at}");
            assert!(!read.notices.is_empty() || read.is_foreign, "byte {at} was not noticed");
        }
    }

    #[test]
    fn a_file_of_a_later_version_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("learned.jsonl");
        let json = r#"{"version":2}"#;
        let text = format!("{:016x} {json}\n", fnv1a(json.as_bytes()));
        std::fs::write(&path, &text).unwrap();
        let mut read = Learned::read(&RealDisk, &path);
        read.note_kind("a", &Profile::of_step(1.0), 5);
        read.save(&RealDisk, &path).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut learned = Learned::default();
        for n in 0..2 * MOST_KINDS as u64 {
            learned.note_kind(&n.to_string(), &Profile::of_step(1.0), n);
        }
        (0..2 * MOST_LENGTHS).for_each(|_| learned.note_length("0", 10.0));
        learned.shrink();
        assert_eq!(learned.kinds.len(), MOST_KINDS);
        assert!(!learned.kinds.contains_key("0") && learned.lengths.values().sum::<u32>() > 1000);
    }
}
