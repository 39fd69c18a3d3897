//! Services that are answered from CUDA graphs, as production servers do: one graph for each batch
//! size, launched at once. The same models launched kernel by kernel wait for the CPU, and hardly
//! any way of sharing shows.
//!
//! Only their batch times on the whole GPU were measured. What their kernels do to a GPU follows
//! from the counters of the same model without graphs: as many launches for each batch, in less
//! time and without gaps. Their speed on fewer SMs is that of a task without a measured curve.

use super::Atlas;
use super::service::Service;
use super::task::Task;
use crate::measurement::contention::TaskId;
use crate::measurement::rows::{RowError, TaskKind};
use serde::Deserialize;
use std::collections::BTreeMap;

/// Batch times of a service that is answered from CUDA graphs, alone on the whole GPU.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Graphs {
    /// The measured service whose model it is.
    pub service: String,
    /// Milliseconds by batch size.
    pub ms: BTreeMap<u32, f64>,
}

/// The rows of a file; empty lines are skipped.
pub fn read_graphs(text: &str) -> Result<Vec<Graphs>, RowError> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let read = |(i, line): (usize, &str)| {
        let row: Graphs = serde_json::from_str(line)
            .map_err(|e| RowError { line: i + 1, what: e.to_string() })?;
        let sane = |ms: &f64| ms.is_finite() && *ms > 0.0;
        if row.ms.is_empty() || !row.ms.values().all(sane) || row.ms.contains_key(&0) {
            let what = "expected milliseconds above 0 by batch size".into();
            return Err(RowError { line: i + 1, what });
        }
        Ok(row)
    };
    lines.map(read).collect()
}

/// Ends the names of services that are answered from CUDA graphs.
const SUFFIX: &str = "-graphs";

impl Atlas {
    /// Adds these services under the name of their model and `-graphs`. Rows of models that are not
    /// known as services, or that are there already, are left out.
    #[must_use]
    pub fn with_graphs(mut self, rows: &[Graphs]) -> Self {
        for Graphs { service, ms } in rows {
            let name = (TaskKind::Serve, format!("{service}{SUFFIX}"));
            let Some(base) = self.task(TaskKind::Serve, service) else { continue };
            if self.names.contains_key(&name) {
                continue;
            }
            let id = TaskId(self.tasks.len() as u16);
            let times: Vec<(u32, f64)> = ms.iter().map(|(batch, ms)| (*batch, ms / 1e3)).collect();
            self.tasks.push(Task::graphs(&self.tasks[usize::from(base.0)], &times));
            let drawn = Service::drawn(&times, self.sms, |batch, sms| self.kept(id, batch, sms));
            self.services.insert(id, drawn);
            self.names.insert(name, id);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measurement::atlas::Tenant;
    use crate::measurement::atlas::tests::h200;

    #[test]
    fn a_service_from_graphs_has_the_same_kernels_in_less_time() {
        let rows = read_graphs(r#"{"service": "bert", "ms": {"1": 1.8, "16": 3.6}}"#).unwrap();
        let plain = h200();
        let atlas = plain.clone().with_graphs(&rows);
        let task = |name: &str| atlas.task(TaskKind::Serve, name).unwrap();
        let (slow, fast) = (task("bert"), task("bert-graphs"));
        assert!((atlas.batch_s(fast, 16, None) - 0.0036).abs() < 1e-12);
        let launches = |task| atlas.footprint(task, 16).launches / atlas.steps_per_s(task, 16);
        assert!((launches(slow) / launches(fast) - 1.0).abs() < 1e-9);
        // On fewer SMs it is slower, and beside training it waits more often in the same time.
        assert!(atlas.batch_s(fast, 16, Some(33)) > 1.5 * atlas.batch_s(fast, 16, None));
        let vit = atlas.task(TaskKind::Train, "vit-b16-imagenet").unwrap();
        let slowdown =
            |service| atlas.slowdown(&[Tenant::plain(service, 16), Tenant::plain(vit, 64)], 0);
        assert!(slowdown(fast) > 1.5 * slowdown(slow));
        // Nothing else changes.
        let tenants = [Tenant::plain(slow, 16), Tenant::plain(vit, 64)];
        assert_eq!(plain.slowdown(&tenants, 0), atlas.slowdown(&tenants, 0));
        assert_eq!(plain.speed(&tenants, 1), atlas.speed(&tenants, 1));
    }

    #[test]
    fn rows_that_cannot_be_true_are_refused() {
        let wrong = [r#"{"service": "bert", "ms": {}}"#, r#"{"service": "bert", "ms": {"1": -1}}"#];
        for text in wrong {
            assert_eq!(read_graphs(text).unwrap_err().line, 1, "{text}");
        }
    }
}
