//! What changes cost, and what only published simulators do.

use crate::time::{Span, Time};
use serde::{Deserialize, Serialize};

/// What it costs to change something, as the world has it. Data: policies read the price.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(from = "Written", into = "Written")]
pub struct Costs {
    /// Time without progress at the very first start.
    pub start: Span,
    /// Time without progress at each later start, unless the profile knows better.
    pub restart: Span,
    /// Time without progress when a suspended job goes on, on the nodes where it was.
    pub resume: Span,
    /// Time without progress when a job is moved; as a restart, unless said.
    pub migrate: Option<Span>,
    /// Time without progress when a job's knobs are turned.
    pub tune: Span,
    /// MiB per second between host and GPU: a job with less GPU memory than it asked for keeps the
    /// rest on the host and moves it in and out at every step.
    pub host_mib_s: u32,
    /// Pause after a job's first failure; doubles with each further one.
    pub backoff: Span,
    /// Whether a job that is being started leaves its roommates alone until it is: what a process
    /// does before its first step, it does on CPUs.
    pub quiet_start: bool,
    /// Most tenants that one GPU may have.
    pub max_tenants: u8,
    /// What published simulators do and no cluster; the default is none of it.
    pub quirks: Quirks,
}

impl Costs {
    /// Most tenants of a GPU, unless said.
    pub const USUAL_TENANTS: u8 = 4;
    /// The largest such limit: what tenants cost each other is summed over all sets of them.
    pub const MOST_TENANTS: u8 = 16;
}

impl Default for Costs {
    /// A restart costs the mean that the Tiresias testbed measured.
    fn default() -> Self {
        Self {
            start: Span::ZERO,
            restart: Span::from_secs(62.0),
            resume: Span::from_secs(1.0),
            migrate: None,
            tune: Span::ZERO,
            host_mib_s: 12_000,
            backoff: Span::from_secs(30.0),
            quiet_start: false,
            max_tenants: Self::USUAL_TENANTS,
            quirks: Quirks::default(),
        }
    }
}

/// How published simulators count time where a cluster does not. Only compat modes set any of it
/// (docs/decisions/001).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Quirks {
    /// When a restart is charged.
    pub charge: Charge,
    /// A world of rounds: of a round only whole steps count, and the end of a job is seen at the
    /// end of a round.
    pub round: Option<Span>,
    /// Whether jobs that share GPUs end only when all tenants of these GPUs have finished or left.
    pub ends_together: bool,
}

/// When a job loses time to a (re)start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Charge {
    /// When it really restarts.
    #[default]
    OnRestart,
    /// At every scheduling step during which it runs.
    EveryStep,
    /// The same, and roommates pay for each other: all lose the sum of their costs.
    EveryStepTogether,
}

impl Charge {
    /// Whether running jobs pay at every step.
    pub fn at_every_step(self) -> bool {
        self != Self::OnRestart
    }
}

impl Quirks {
    /// Seconds of a step such that as many steps as fit wholly into a round fill it.
    pub(super) fn in_whole_steps(&self, step_s: f64) -> f64 {
        let Some(round) = self.round else { return step_s };
        // The quotient of two decimals may be just below the whole number that it is.
        let whole = (round.secs() / step_s * (1.0 + 1e-12)).floor();
        if whole >= 1.0 { round.secs() / whole } else { step_s }
    }

    /// When the end of a job that began at `began` and is through at `end` is seen.
    pub fn seen(&self, began: Time, end: Time) -> Time {
        match self.round {
            Some(round) => began + Span((end - began).0.div_ceil(round.0) * round.0),
            None => end,
        }
    }
}

/// Costs as a journal's head has them: one flat object, quirks among the rest.
#[derive(Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Written {
    charge: Charge,
    start: Span,
    restart: Span,
    resume: Span,
    #[serde(skip_serializing_if = "Option::is_none")]
    migrate: Option<Span>,
    tune: Span,
    host_mib_s: u32,
    backoff: Span,
    #[serde(skip_serializing_if = "Option::is_none")]
    round: Option<Span>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    ends_together: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    quiet_start: bool,
    #[serde(skip_serializing_if = "are_usual")]
    max_tenants: u8,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn are_usual(max_tenants: &u8) -> bool {
    *max_tenants == Costs::USUAL_TENANTS
}

impl Default for Written {
    fn default() -> Self {
        Costs::default().into()
    }
}

impl From<Costs> for Written {
    fn from(costs: Costs) -> Self {
        let Costs { start, restart, resume, migrate, tune, host_mib_s, backoff, .. } = costs;
        let Quirks { charge, round, ends_together } = costs.quirks;
        Self {
            charge,
            start,
            restart,
            resume,
            migrate,
            tune,
            host_mib_s,
            backoff,
            round,
            ends_together,
            quiet_start: costs.quiet_start,
            max_tenants: costs.max_tenants,
        }
    }
}

impl From<Written> for Costs {
    fn from(written: Written) -> Self {
        let Written { charge, round, ends_together, .. } = written;
        Self {
            start: written.start,
            restart: written.restart,
            resume: written.resume,
            migrate: written.migrate,
            tune: written.tune,
            host_mib_s: written.host_mib_s,
            backoff: written.backoff,
            quiet_start: written.quiet_start,
            max_tenants: written.max_tenants.clamp(1, Self::MOST_TENANTS),
            quirks: Quirks { charge, round, ends_together },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quirks_are_written_among_the_costs() {
        let usual = concat!(
            r#"{"charge":"on_restart","start":0,"restart":62000000,"resume":1000000,"#,
            r#""tune":0,"host_mib_s":12000,"backoff":30000000}"#
        );
        assert_eq!(serde_json::to_string(&Costs::default()).unwrap(), usual);
        let quirks =
            Quirks { charge: Charge::EveryStep, round: Some(Span(300)), ends_together: true };
        let migrate = Some(Span(7));
        let odd = Costs { migrate, quiet_start: true, max_tenants: 8, quirks, ..Costs::default() };
        let text = serde_json::to_string(&odd).unwrap();
        assert!(
            text.ends_with(r#""ends_together":true,"quiet_start":true,"max_tenants":8}"#),
            "{text}"
        );
        assert_eq!(serde_json::from_str::<Costs>(&text).unwrap(), odd);
        assert_eq!(serde_json::from_str::<Costs>("{}").unwrap(), Costs::default());
        assert!(serde_json::from_str::<Costs>(r#"{"quirks": {}}"#).is_err());
    }
}
