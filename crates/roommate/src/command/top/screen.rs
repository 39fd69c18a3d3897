//! The state of `roommate top`: the last answers of the daemon, the mode and the selected job.

use roommate_agent::api::control::{JobView, MachineView, Request};
use std::cmp::Reverse;

/// The last answer of the daemon.
#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    pub(super) machine: MachineView,
    pub(super) jobs: Vec<JobView>,
}

/// Sort order of the tenants.
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

/// What is shown.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(super) enum Mode {
    /// The overview.
    #[default]
    All,
    /// Details of the selected job.
    Detail,
    /// The question whether to cancel the selected job.
    Confirm,
}

/// Keys that have a meaning.
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

/// The effect of a key outside the screen.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Do {
    Nothing,
    Quit,
    Ask(Request),
}

#[derive(Default)]
pub(super) struct Screen {
    /// The last answer; it is kept when the daemon does not answer any more.
    pub(super) snapshot: Option<Snapshot>,
    /// Why the last query failed.
    pub(super) lost: Option<String>,
    /// The result of the last request of the user.
    pub(super) message: Option<String>,
    pub(super) mode: Mode,
    pub(super) order: Order,
    /// Name of the selected job; an index would change when jobs come and go.
    pub(super) at: Option<String>,
}

/// Jobs that a page key moves the selection by.
const PAGE: usize = 10;

impl Screen {
    /// Processes an answer of the daemon, or the reason there is none.
    pub(super) fn take(&mut self, answer: Result<Snapshot, String>) {
        match answer {
            Ok(snapshot) => (self.snapshot, self.lost) = (Some(snapshot), None),
            Err(why) => self.lost = Some(why),
        }
        let listed: Vec<&str> = self.listed().map(|j| j.name.as_str()).collect();
        let still = self.at.as_deref().is_some_and(|at| listed.contains(&at));
        if !still {
            // The details of a job stay open after its end.
            if self.mode != Mode::Detail {
                self.at = listed.first().map(ToString::to_string);
            }
            if self.mode == Mode::Confirm {
                self.mode = Mode::All;
            }
        }
    }

    /// Jobs with devices, in the selected order.
    pub(super) fn tenants(&self) -> Vec<&JobView> {
        let mut jobs: Vec<&JobView> =
            self.jobs().iter().filter(|j| !j.ended && !j.devices.is_empty()).collect();
        let part = |j: &JobView| j.steps.map_or(-1.0, |all| j.done / all);
        match self.order {
            Order::Submitted => {}
            Order::Name => jobs.sort_by(|a, b| a.name.cmp(&b.name)),
            Order::Progress => jobs.sort_by(|a, b| part(b).total_cmp(&part(a))),
            Order::Eta => {
                let left = |j: &JobView| j.left_s.map_or(f64::INFINITY, f64::from);
                jobs.sort_by(|a, b| left(a).total_cmp(&left(b)));
            }
            Order::Memory => jobs.sort_by_key(|j| Reverse(j.mem_mib)),
        }
        jobs
    }

    /// Jobs without devices.
    pub(super) fn queue(&self) -> Vec<&JobView> {
        self.jobs().iter().filter(|j| !j.ended && j.devices.is_empty()).collect()
    }

    fn jobs(&self) -> &[JobView] {
        self.snapshot.as_ref().map_or(&[], |s| &s.jobs)
    }

    /// All jobs that can be selected.
    fn listed(&self) -> impl Iterator<Item = &JobView> {
        self.tenants().into_iter().chain(self.queue())
    }

    /// The selected job.
    pub(super) fn pointed(&self) -> Option<&JobView> {
        let at = self.at.as_deref()?;
        self.jobs().iter().find(|j| j.name == at)
    }

    /// Handles a key.
    pub(super) fn press(&mut self, key: Key) -> Do {
        self.message = None;
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
