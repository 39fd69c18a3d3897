//! Accuracy of interpolation between measurements of tasks alone: each point is left out and
//! predicted from the other points of its session.

use super::as_solo;
use super::service::Service;
use super::task::Task;
use crate::measurement::contention::Errors;
use crate::measurement::rows::{Row, Solo, TaskKind};
use crate::performance::latency::{Axis, Curve};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Relative errors at points that lie between others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct AloneErrors {
    /// Steps of training on another number of SMs.
    pub step_sms: Errors,
    /// Steps of training at another batch size, on the whole GPU.
    pub step_batch: Errors,
    /// GPU memory of all tasks at another batch size.
    pub memory_batch: Errors,
    /// Batches of services on another number of SMs, interpolated between the neighbouring points.
    pub serve_sms: Errors,
    /// Batches of services on another number of SMs, from the fitted two-line latency curve.
    pub serve_curve: Errors,
    /// Batches of services at another batch size, on the whole GPU.
    pub serve_batch: Errors,
}

/// Errors collected so far.
#[derive(Default)]
struct Found {
    step_sms: Vec<f64>,
    step_batch: Vec<f64>,
    memory_batch: Vec<f64>,
    serve_sms: Vec<f64>,
    serve_curve: Vec<f64>,
    serve_batch: Vec<f64>,
}

/// Leaves out each point of these sessions in turn.
pub fn check_alone(sessions: &[Vec<Row>]) -> AloneErrors {
    let mut found = Found::default();
    for rows in sessions {
        let mut by_name: BTreeMap<(TaskKind, &str), Vec<&Solo>> = BTreeMap::new();
        for solo in rows.iter().filter_map(as_solo) {
            by_name.entry((solo.kind, &solo.name)).or_default().push(solo);
        }
        let all = rows.iter().filter_map(as_solo).map(|s| s.sms).max().unwrap_or(0);
        for ((kind, _), rows) in by_name {
            found.over_sms(kind, &rows, all);
            found.over_batches(kind, &rows, all);
        }
    }
    AloneErrors {
        step_sms: Errors::of(found.step_sms),
        step_batch: Errors::of(found.step_batch),
        memory_batch: Errors::of(found.memory_batch),
        serve_sms: Errors::of(found.serve_sms),
        serve_curve: Errors::of(found.serve_curve),
        serve_batch: Errors::of(found.serve_batch),
    }
}

fn off(told: f64, measured: f64) -> f64 {
    (told / measured - 1.0).abs()
}

/// All but the first and the last.
fn inner<T>(values: &BTreeSet<T>) -> impl Iterator<Item = &T> {
    values.iter().skip(1).take(values.len().saturating_sub(2))
}

/// The fastest run, as everywhere: a task alone is only ever disturbed towards slower.
fn fastest<'a>(rows: impl Iterator<Item = &'a &'a Solo>) -> Option<&'a Solo> {
    rows.copied().max_by(|a, b| a.it_s.total_cmp(&b.it_s))
}

impl Found {
    fn over_sms(&mut self, kind: TaskKind, rows: &[&Solo], all: u32) {
        let whole = rows.iter().filter(|r| r.sms == all).map(|r| r.batch);
        for batch in whole.collect::<BTreeSet<u32>>() {
            let of_batch = || rows.iter().filter(move |r| r.batch == batch);
            let numbers: BTreeSet<u32> = of_batch().map(|r| r.sms).collect();
            for sms in inner(&numbers) {
                let here = |r: &&&Solo| r.batch == batch && r.sms == *sms;
                let Some(left_out) = fastest(rows.iter().filter(here)) else { continue };
                let rest: Vec<&Solo> = rows.iter().filter(|r| !here(r)).copied().collect();
                let measured_s = 1.0 / left_out.it_s;
                if kind == TaskKind::Train {
                    let task = Task::new(&rest, all);
                    let per_s = task.steps_per_s(batch) * task.kept(batch, *sms, all, 1.0);
                    self.step_sms.push(off(1.0 / per_s, measured_s));
                    continue;
                }
                let told_s = Service::new(&rest, all).batch_s(batch, Some(*sms));
                self.serve_sms.push(off(told_s, measured_s));
                let share = |sms: u32| f64::from(sms) / f64::from(all);
                let point = |n: &u32| {
                    Some((share(*n), 1.0 / fastest(of_batch().filter(|r| r.sms == *n))?.it_s))
                };
                let others = numbers.iter().filter(|n| *n != sms);
                let points: Vec<(f64, f64)> = others.filter_map(point).collect();
                if let Some(curve) = Curve::fit(Axis::Inverse, &points) {
                    self.serve_curve.push(off(curve.at(share(*sms)), measured_s));
                }
            }
        }
    }

    fn over_batches(&mut self, kind: TaskKind, rows: &[&Solo], all: u32) {
        let whole = || rows.iter().filter(move |r| r.sms == all);
        let batches: BTreeSet<u32> = whole().map(|r| r.batch).collect();
        for batch in inner(&batches) {
            let Some(left_out) = fastest(whole().filter(|r| r.batch == *batch)) else { continue };
            let rest: Vec<&Solo> = rows.iter().filter(|r| r.batch != *batch).copied().collect();
            let (task, measured_s) = (Task::new(&rest, all), 1.0 / left_out.it_s);
            self.memory_batch.push(off(task.mem_mib(*batch), left_out.mem_mib));
            if kind == TaskKind::Train {
                self.step_batch.push(off(1.0 / task.steps_per_s(*batch), measured_s));
            } else {
                let told_s = Service::new(&rest, all).batch_s(*batch, None);
                self.serve_batch.push(off(told_s, measured_s));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measurement::rows::parse;

    fn rows(kind: &str, it_s: impl Fn(u32, u32) -> f64, mem: impl Fn(u32) -> f64) -> String {
        let mut text = String::new();
        for batch in [8, 16, 32, 64] {
            for sms in [24, 48, 96, 132] {
                text += &format!(
                    "{{\"kind\":\"{kind}\",\"name\":\"t\",\"batch\":{batch},\"sms\":{sms},\
                     \"mem_mib\":{},\"it_s\":{}}}\n",
                    mem(batch),
                    it_s(batch, sms)
                );
            }
        }
        text
    }

    #[test]
    fn points_on_the_curves_are_predicted_exactly_others_are_not() {
        let line = |_: u32, sms: u32| f64::from(sms);
        let text = rows("train", line, |b| 100.0 + f64::from(b));
        let found = check_alone(&[parse(&text).unwrap()]);
        assert_eq!((found.step_sms.sides, found.memory_batch.sides), (4 * 2, 2));
        assert!(found.step_sms.mae < 1e-9 && found.memory_batch.mae < 1e-9, "{found:?}");
        // A step that takes equally long at every batch size is predicted exactly as well.
        assert!(found.step_batch.sides == 2 && found.step_batch.mae < 1e-9, "{found:?}");
        assert_eq!(found.serve_sms.sides, 0);
        let kink = |batch: u32, sms: u32| if sms == 48 { 90.0 } else { line(batch, sms) };
        let text = rows("train", kink, |b| if b == 16 { 300.0 } else { 100.0 });
        let found = check_alone(&[parse(&text).unwrap()]);
        assert!(found.step_sms.mae > 0.2 && found.memory_batch.mae > 0.3, "{found:?}");
    }

    #[test]
    fn services_are_predicted_from_points_and_from_two_lines() {
        // Time proportional to 1/share: two lines over 1/share are exact, and so are straight lines
        // over speed.
        let text = rows("serve", |b, sms| f64::from(sms) / f64::from(b), |_| 100.0);
        let found = check_alone(&[parse(&text).unwrap()]);
        assert_eq!(
            (found.serve_sms.sides, found.serve_curve.sides, found.serve_batch.sides),
            (8, 8, 2)
        );
        assert!(found.serve_curve.mae < 1e-6, "{found:?}");
        assert!(found.serve_sms.mae < 1e-6 && found.serve_batch.mae < 1e-6, "{found:?}");
    }

    #[test]
    fn ends_are_never_left_out() {
        let text = rows("train", |_, sms| f64::from(sms), |_| 1.0);
        let few: String = text
            .lines()
            .filter(|l| l.contains("\"sms\":132") || l.contains("\"sms\":24"))
            .map(|l| l.to_string() + "\n")
            .collect();
        assert_eq!(check_alone(&[parse(&few).unwrap()]).step_sms.sides, 0);
        assert_eq!(check_alone(&[]), AloneErrors::default());
    }
}
