//! What `roommate top` shows, as data: the last answers of the daemon, and what the person is at.

use roommate_agent::api::control::{JobView, MachineView, Request};
use std::cmp::Reverse;

/// What the daemon said last.
#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    pub(super) machine: MachineView,
    pub(super) jobs: Vec<JobView>,
}

/// By what tenants are ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) enum Order {
    #[default]
    Submitted,
    Name,
    Progress,
    Eta,
    Memory,
}

impl Order {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Submitted => "submission",
            Self::Name => "name",
            Self::Progress => "progress",
            Self::Eta => "time left",
            Self::Memory => "memory",
        }
    }

    fn next(self) -> Self {
        match self {
            Self::Submitted => Self::Name,
            Self::Name => Self::Progress,
            Self::Progress => Self::Eta,
            Self::Eta => Self::Memory,
            Self::Memory => Self::Submitted,
        }
    }
}

/// What the person is at.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(super) enum Mode {
    /// Looks at everything.
    #[default]
    All,
    /// Looks at one job.
    Detail,
    /// Is asked whether to cancel it.
    Confirm,
}

/// What a key means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Up,
    Down,
    PageUp,
    PageDown,
    Enter,
    Escape,
    Letter(char),
}

/// What is to be done about a key.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Do {
    Nothing,
    Quit,
    Ask(Request),
}

#[derive(Default)]
pub(super) struct Screen {
    /// The last answer; stays when the daemon goes away.
    pub(super) snapshot: Option<Snapshot>,
    /// Reason there is none newer.
    pub(super) lost: Option<String>,
    /// What came of the last thing that was asked for.
    pub(super) said: Option<String>,
    pub(super) mode: Mode,
    pub(super) order: Order,
    /// The job that the person points at; by name, as others come and go.
    pub(super) at: Option<String>,
}

/// Far enough for a list of hundreds, near enough to see where one was.
const PAGE: usize = 10;

impl Screen {
    /// Takes in an answer, or why there was none.
    pub(super) fn take(&mut self, heard: Result<Snapshot, String>) {
        match heard {
            Ok(snapshot) => (self.snapshot, self.lost) = (Some(snapshot), None),
            Err(why) => self.lost = Some(why),
        }
        let listed: Vec<&str> = self.listed().map(|j| j.name.as_str()).collect();
        let still = self.at.as_deref().is_some_and(|at| listed.contains(&at));
        if !still {
            // One that ended can still be read about.
            if self.mode != Mode::Detail {
                self.at = listed.first().map(ToString::to_string);
            }
            if self.mode == Mode::Confirm {
                self.mode = Mode::All;
            }
        }
    }

    /// Jobs with devices, in the order that the person wants.
    pub(super) fn tenants(&self) -> Vec<&JobView> {
        let mut jobs: Vec<&JobView> =
            self.jobs().iter().filter(|j| !j.ended && !j.devices.is_empty()).collect();
        let part = |j: &JobView| j.steps.map_or(-1.0, |all| j.done / all);
        match self.order {
            Order::Submitted => {}
            Order::Name => jobs.sort_by(|a, b| a.name.cmp(&b.name)),
            Order::Progress => jobs.sort_by(|a, b| part(b).total_cmp(&part(a))),
            Order::Eta => {
                let left = |j: &JobView| j.left_s.unwrap_or(f64::INFINITY);
                jobs.sort_by(|a, b| left(a).total_cmp(&left(b)));
            }
            Order::Memory => jobs.sort_by_key(|j| Reverse(j.mem_mib)),
        }
        jobs
    }

    /// Jobs that wait.
    pub(super) fn queue(&self) -> Vec<&JobView> {
        self.jobs().iter().filter(|j| !j.ended && j.devices.is_empty()).collect()
    }

    fn jobs(&self) -> &[JobView] {
        self.snapshot.as_ref().map_or(&[], |s| &s.jobs)
    }

    /// All that can be pointed at.
    fn listed(&self) -> impl Iterator<Item = &JobView> {
        self.tenants().into_iter().chain(self.queue())
    }

    /// The job that is pointed at.
    pub(super) fn pointed(&self) -> Option<&JobView> {
        let at = self.at.as_deref()?;
        self.jobs().iter().find(|j| j.name == at)
    }

    /// What a key changes, and what it asks for.
    pub(super) fn press(&mut self, key: Key) -> Do {
        self.said = None;
        if self.mode == Mode::Confirm {
            self.mode = Mode::All;
            let sure = matches!(key, Key::Letter('y') | Key::Enter);
            return match self.at.clone().filter(|_| sure) {
                Some(job) => Do::Ask(Request::Cancel { job }),
                None => Do::Nothing,
            };
        }
        let job = self.pointed().map(|j| j.name.clone());
        match key {
            Key::Escape | Key::Letter('q') | Key::Enter if self.mode == Mode::Detail => {
                self.mode = Mode::All;
            }
            Key::Letter('q') | Key::Escape => return Do::Quit,
            Key::Up => self.point(-1),
            Key::Down => self.point(1),
            Key::PageUp => self.point(-(PAGE as isize)),
            Key::PageDown => self.point(PAGE as isize),
            Key::Enter if job.is_some() => self.mode = Mode::Detail,
            Key::Letter('c') if job.is_some() => self.mode = Mode::Confirm,
            Key::Letter('s') => {
                return job.map_or(Do::Nothing, |job| Do::Ask(Request::Suspend { job }));
            }
            Key::Letter('r') => {
                return job.map_or(Do::Nothing, |job| Do::Ask(Request::Resume { job }));
            }
            Key::Letter('o') => self.order = self.order.next(),
            Key::Enter | Key::Letter(_) => {}
        }
        Do::Nothing
    }

    fn point(&mut self, by: isize) {
        let names: Vec<String> = self.listed().map(|j| j.name.clone()).collect();
        let at = self.at.as_ref().and_then(|at| names.iter().position(|n| n == at)).unwrap_or(0);
        let to = at.saturating_add_signed(by).min(names.len().saturating_sub(1));
        self.at = names.get(to).cloned();
    }
}
