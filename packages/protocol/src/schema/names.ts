import Type from 'typebox'
import { limits } from '../wire/limits.js'

/** A queue, partition or other name: any characters but NUL, which the body parser refuses everywhere. */
export const Name = Type.String({ minLength: 1, maxLength: limits.nameCodePoints })

export const OperationId = Type.String({ format: 'uuid' })

/** RFC 3339, UTC, with milliseconds. */
export const Timestamp = Type.String({ format: 'date-time' })
