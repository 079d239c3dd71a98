//! The KV connector of a recording: the reports that it makes by itself, and the calls on it.

use super::input::{Add, KvDone};
use super::replay::Replay;
use super::step::{Call, Done, FinishedStatus, KvTransferParams, Report};
use crate::output::FinishReason;
use crate::request::SequenceId;
use crate::scheduler::{ConnectorCall, KeepBlocks, LoadTiming, RemoteCopy, RemoteKv, TransferReport};

/// Transfers that end by themselves: the step whose batch reports them, and whose they are.
#[derive(Debug, Default)]
pub(super) struct Connector {
    loads: Vec<(u32, SequenceId)>,
    sends: Vec<(u32, SequenceId)>,
}

fn take_due(transfers: &mut Vec<(u32, SequenceId)>, step: u32) -> Vec<SequenceId> {
    let mut due: Vec<_> = transfers.extract_if(.., |(due, _)| *due == step).map(|(_, sequence)| sequence).collect();
    due.sort_unstable();
    due
}

impl Add {
    /// The request's KV elsewhere. Every request has a connector to deal with, if only to hear that there is none.
    pub(super) fn remote_kv(&self) -> RemoteKv {
        RemoteKv {
            copy: self.remote_tokens.map(|tokens| RemoteCopy {
                tokens,
                load: if self.load_async { LoadTiming::BetweenPasses } else { LoadTiming::WithinPass },
                lasting: !self.load_once,
                undecided_look_ups: self.match_pending,
            }),
            keep: self.send.map_or(KeepBlocks::Never, Into::into),
        }
    }
}

impl Replay<'_> {
    /// The calls on the connector since the last ones, in a recording's words.
    pub(super) fn take_calls(&mut self) -> Vec<Call> {
        let step = self.step;
        let calls = self.scheduler.take_connector_calls();
        calls.into_iter().map(|call| self.call(call, step)).collect()
    }

    fn call(&mut self, call: ConnectorCall, step: u32) -> Call {
        match call {
            ConnectorCall::Matched { sequence, local_tokens, answer, between_passes } => Call::GetNumNewMatchedTokens {
                id: self.id(sequence),
                num_computed_tokens: local_tokens,
                answer: (answer, between_passes),
            },
            ConnectorCall::Allocated { sequence, blocks, external_tokens } => {
                let add = self.add_of(sequence);
                if let Some(after) = add.recv_after.filter(|_| external_tokens > 0 && add.load_async) {
                    // The last step of all is never reached.
                    self.connector.loads.push((step.saturating_add(after), sequence));
                }
                Call::UpdateStateAfterAlloc {
                    id: self.id(sequence),
                    block_ids: blocks,
                    num_external_tokens: external_tokens,
                }
            }
            ConnectorCall::Finished { sequence, finish, blocks, computed_tokens, kept } => {
                let add = self.add_of(sequence);
                if let Some(after) = add.sent_after.filter(|_| kept) {
                    self.connector.sends.push((step.saturating_add(after), sequence));
                }
                if kept {
                    self.params.push((sequence, blocks.clone(), computed_tokens));
                }
                let status = FinishedStatus::from(finish);
                Call::RequestFinished { id: self.id(sequence), status, block_ids: blocks, delay_free: kept }
            }
        }
    }

    /// What is reported with the output of this step's batch, and how the recording shows it.
    pub(super) fn take_report(&mut self, explicit: Option<&KvDone>) -> Option<(TransferReport, Report)> {
        let mut report = Report::default();
        if let Some(done) = explicit {
            report.sent.clone_from(&done.sent);
            report.received.clone_from(&done.received);
            report.failed.clone_from(&done.failed);
            report.invalid_blocks.clone_from(&done.invalid_blocks);
        }
        for sequence in take_due(&mut self.connector.loads, self.step) {
            let id = self.id(sequence);
            let invalid = self.add_of(sequence).recv_invalid.iter().map(|&block| (id.clone(), block));
            report.invalid_blocks.extend(invalid);
            report.received.push(id);
        }
        let sends = take_due(&mut self.connector.sends, self.step);
        report.sent.extend(sends.into_iter().map(|sequence| self.id(sequence)));
        if report == Report::default() {
            return None;
        }
        let block = |(id, block): &(String, u32)| {
            let sequence = self.scheduler.view().sequence(self.sequences[id.as_str()]);
            sequence.and_then(|sequence| sequence.block_ids.get(*block as usize).copied())
        };
        report.invalid_block_ids = report.invalid_blocks.iter().filter_map(block).collect();
        let sequences = |ids: &[String]| ids.iter().map(|id| self.sequences[id.as_str()]).collect();
        let transfers = TransferReport {
            invalid_blocks: report.invalid_block_ids.clone(),
            failed: sequences(&report.failed),
            received: sequences(&report.received),
            sent: sequences(&report.sent),
        };
        Some((transfers, report))
    }

    /// What a source hands on with its last output.
    pub(super) fn kv_transfer_params(
        &self,
        sequence: SequenceId,
        cached_tokens: Option<u32>,
    ) -> Option<KvTransferParams> {
        let (_, blocks, tokens) = self.params.iter().find(|(of, ..)| *of == sequence)?;
        Some(KvTransferParams {
            do_remote_prefill: true,
            remote_block_ids: blocks.clone(),
            remote_num_tokens: *tokens,
            remote_prefill_cached_tokens: cached_tokens,
        })
    }

    /// An input with the calls that it led to.
    pub(super) fn with_calls(&mut self, done: Done) -> Done {
        if !self.has_connector() {
            return done;
        }
        let mut calls = self.take_calls();
        match done {
            Done::Add { id, .. } => {
                calls.insert(0, Call::OnNewRequest { id: id.clone() });
                Done::Add { id, connector: calls }
            }
            Done::Abort { ids, aborted, .. } => Done::Abort { ids, aborted, connector: calls },
            done => done,
        }
    }
}

impl From<FinishReason> for FinishedStatus {
    fn from(finish: FinishReason) -> Self {
        match finish {
            FinishReason::Stop { .. } => Self::Stopped,
            FinishReason::Length => Self::LengthCapped,
            FinishReason::TransferFailed => Self::Error,
            _ => Self::Aborted,
        }
    }
}
