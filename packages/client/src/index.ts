/** The public surface of the client. */
export type {
  AckResult,
  AckStatus,
  DecideAnswer,
  DryRunResult,
  LaneView,
  OperationStatus,
  OperationView,
  PetitionReceipt,
  PetitionState,
  PetitionStatus,
  PetitionType,
  PetitionView,
  PolicyView,
  PoppedMessage,
  ProblemCode,
  ProblemDocument,
  PushResult,
  QueuedAnswer,
  QueuedLane,
  QueuedReason,
  QueueOptions,
  RouteDecision,
  StreamComplete,
} from '@spillway/protocol/wire'
export { type Client, createClient } from './client.js'
export { SpillwayError, type SpillwayErrorCode } from './error.js'
export type {
  GeneratedChunk,
  GenerateOptions,
  GenerateRequest,
  Generation,
  ResumeOptions,
} from './generation/generation.js'
export type { CallOptions } from './http/call.js'
export type { KeyOptions } from './idempotency.js'
export type { Address } from './messages/address.js'
export type { ConsumeOptions, Consumer, Handler } from './messages/consume.js'
export type { Renewal } from './messages/lease.js'
export type {
  Ack,
  Acked,
  AnyQueue,
  Messages,
  PopOptions,
  QueueConfiguration,
  Transacted,
  TransactionOptions,
  TransactionStep,
} from './messages/messages.js'
export type { Envelope, Pushed, PushedLater, PushedNow, PushItem, PushOptions } from './messages/push.js'
export type { DeadLetter, DeadLetters, Redrive } from './operations/dead-letters.js'
export type { FollowOptions, OperationEvent } from './operations/follow.js'
export type { Lane, LaneState, Lanes } from './operations/lanes.js'
export type {
  OperationFilter,
  Operations,
  Order,
  SubmitOptions,
  Submitted,
  WaitOptions,
} from './operations/operations.js'
export type {
  ClientOptions,
  Hooks,
  Logger,
  QueuedOperationBehavior,
  Retrying,
  RetryOptions,
  Waiting,
} from './options.js'
export type { NewPetition, Petitions } from './petitions/petitions.js'
export type { RetryBudgetOptions } from './policy/retry-budget.js'
export type { ThrottleOptions } from './policy/throttle.js'
export type { Page, PageOptions } from './resources.js'
export type { Done, Failed, Jsonified, Refused, Route, RouteDefinition, RouteResult, Ticket } from './routes/route.js'
export type { NewPolicy, Policies, Routing, Task, TaskOptions } from './routing/routing.js'
