//! What is counted, in the text format of Prometheus. Where kube-scheduler counts the same, names
//! and labels are its own, behind our prefix.

use crate::world::World;
use std::fmt::Write as _;
use std::time::Duration;

/// Upper bounds of the classes of all histograms, in seconds.
const BOUNDS: [f64; 12] = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0];

/// Durations, by class.
#[derive(Clone, Debug, Default)]
pub(super) struct Histogram {
    classes: [u64; BOUNDS.len()],
    count: u64,
    sum_s: f64,
}

impl Histogram {
    pub(super) fn add(&mut self, duration: Duration) {
        let s = duration.as_secs_f64();
        self.count += 1;
        self.sum_s += s;
        if let Some(class) = BOUNDS.iter().position(|bound| s <= *bound) {
            self.classes[class] += 1;
        }
    }

    fn print(&self, name: &str, help: &str, out: &mut String) {
        _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram");
        let mut below = 0;
        for (bound, n) in BOUNDS.iter().zip(self.classes) {
            below += n;
            _ = writeln!(out, "{name}_bucket{{le=\"{bound}\"}} {below}");
        }
        _ = writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {}", self.count);
        _ = writeln!(out, "{name}_sum {}\n{name}_count {}", self.sum_s, self.count);
    }
}

/// What the scheduler counts besides the world.
#[derive(Clone, Debug, Default)]
pub(super) struct Metrics {
    /// Deciding, for all that was observed together.
    pub(super) decide: Histogram,
    /// A binding, from when it was sent to its answer.
    pub(super) bind: Histogram,
    /// From when a pod was seen first to its binding.
    pub(super) wait: Histogram,
    /// Requests that failed.
    pub(super) failures: u64,
    /// Watches that had to begin anew.
    pub(super) relists: u64,
    /// Explanations that were dropped, because too many waited to be written.
    pub(super) dropped: u64,
}

impl Metrics {
    /// All of it. `world` is what this scheduler leads, if it does.
    pub(super) fn page(&self, world: Option<&World>, term: u64) -> String {
        let mut out = String::new();
        let version = env!("CARGO_PKG_VERSION");
        let gauge = |out: &mut String, name: &str, help: &str, value: f64| {
            _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}");
        };
        _ = writeln!(
            out,
            "# HELP roommate_build_info The version.\n# TYPE roommate_build_info gauge\n\
             roommate_build_info{{version=\"{version}\"}} 1"
        );
        let leads = f64::from(u8::from(world.is_some()));
        gauge(&mut out, "roommate_leader", "Whether this scheduler leads.", leads);
        let Some(world) = world else { return out };
        gauge(&mut out, "roommate_leader_term", "Its term as leader.", term as f64);
        let (waiting, placed) = world.waiting_and_placed();
        _ = writeln!(
            out,
            "# HELP roommate_pending_pods Pods and gangs that wait.\n\
             # TYPE roommate_pending_pods gauge\nroommate_pending_pods{{queue=\"active\"}} {waiting}"
        );
        gauge(&mut out, "roommate_placed_pods", "Pods and gangs that hold GPUs.", placed as f64);
        let ledger = world.ledger();
        gauge(
            &mut out,
            "roommate_ledger_pods",
            "Pods that hold something in the ledger.",
            ledger.pods() as f64,
        );
        gauge(
            &mut out,
            "roommate_ledger_over_allocated_gpus",
            "GPUs of which more was given away than there is.",
            ledger.over() as f64,
        );
        let counts = world.counts();
        let name = "roommate_schedule_attempts_total";
        _ = writeln!(out, "# HELP {name} Bindings by result.\n# TYPE {name} counter");
        for (result, n) in [("scheduled", counts.bound), ("error", counts.refused)] {
            _ = writeln!(out, "{name}{{result=\"{result}\"}} {n}");
        }
        for (name, help, n) in [
            ("preemption_victims", "Pods that were evicted.", counts.evicted),
            ("assignment_changes", "Assignments of running pods that changed.", counts.changed),
            ("journal_parts", "Parts of the journal begun.", counts.parts),
            ("contradictions", "Facts that could not be believed.", counts.contradictions),
            ("held_back_writes", "Writes that waited for the ledger.", counts.held_back),
            ("api_failures", "Requests that failed.", self.failures),
            ("watch_restarts", "Watches that began anew.", self.relists),
            ("dropped_explanations", "Explanations that were not written.", self.dropped),
        ] {
            let name = format!("roommate_{name}_total");
            _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} counter\n{name} {n}");
        }
        self.decide.print(
            "roommate_scheduling_attempt_duration_seconds",
            "Deciding, for all that was observed together.",
            &mut out,
        );
        self.bind.print(
            "roommate_binding_duration_seconds",
            "A binding, from when it was sent to its answer.",
            &mut out,
        );
        self.wait.print(
            "roommate_pod_scheduling_sli_duration_seconds",
            "From when a pod was seen first to its binding.",
            &mut out,
        );
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_of_a_histogram_add_up() {
        let mut metrics = Metrics::default();
        for ms in [1, 3, 400, 60_000] {
            metrics.bind.add(Duration::from_millis(ms));
        }
        let mut page = String::new();
        metrics.bind.print("x_seconds", "X.", &mut page);
        for line in [
            "x_seconds_bucket{le=\"0.001\"} 1",
            "x_seconds_bucket{le=\"0.005\"} 2",
            "x_seconds_bucket{le=\"30\"} 3",
            "x_seconds_bucket{le=\"+Inf\"} 4",
            "x_seconds_count 4",
        ] {
            assert!(page.lines().any(|l| l == line), "{line} in\n{page}");
        }
        assert!(Metrics::default().page(None, 0).contains("roommate_leader 0"));
    }
}
